/* pullback.h as strict C99: every initialiser, and every function by its declared type. */
#include "pullback/pullback.h"

typedef struct everything {
  pullback_plan_options options;
  pullback_attention_problem attention;
  pullback_attention_tensors attention_tensors;
  pullback_dense_sparsity dense;
  pullback_fixed_sparsity fixed;
  pullback_variable_sparsity variable;
  pullback_bigbird_sparsity bigbird;
  pullback_bslongformer_sparsity bslongformer;
  pullback_local_sliding_window_sparsity local_sliding_window;
  pullback_block_softmax_problem block_softmax;
  pullback_block_softmax_tensors block_softmax_tensors;
  pullback_block_matmul_problem block_matmul;
  pullback_block_matmul_tensors block_matmul_tensors;
  pullback_entmax_problem entmax;
  pullback_entmax_tensors entmax_tensors;
  pullback_segment_problem segment;
  pullback_segment_tensors segment_tensors;
  pullback_segment_permutation_problem segment_permutation;
  pullback_segment_permutation_tensors segment_permutation_tensors;
} everything;

extern const everything defaults;
const everything defaults = {PULLBACK_PLAN_OPTIONS_INIT,
                             PULLBACK_ATTENTION_PROBLEM_INIT,
                             PULLBACK_ATTENTION_TENSORS_INIT,
                             PULLBACK_DENSE_SPARSITY_INIT,
                             PULLBACK_FIXED_SPARSITY_INIT,
                             PULLBACK_VARIABLE_SPARSITY_INIT,
                             PULLBACK_BIGBIRD_SPARSITY_INIT,
                             PULLBACK_BSLONGFORMER_SPARSITY_INIT,
                             PULLBACK_LOCAL_SLIDING_WINDOW_SPARSITY_INIT,
                             PULLBACK_BLOCK_SOFTMAX_PROBLEM_INIT,
                             PULLBACK_BLOCK_SOFTMAX_TENSORS_INIT,
                             PULLBACK_BLOCK_MATMUL_PROBLEM_INIT,
                             PULLBACK_BLOCK_MATMUL_TENSORS_INIT,
                             PULLBACK_ENTMAX_PROBLEM_INIT,
                             PULLBACK_ENTMAX_TENSORS_INIT,
                             PULLBACK_SEGMENT_PROBLEM_INIT,
                             PULLBACK_SEGMENT_TENSORS_INIT,
                             PULLBACK_SEGMENT_PERMUTATION_PROBLEM_INIT,
                             PULLBACK_SEGMENT_PERMUTATION_TENSORS_INIT};

void* first_element(const DLTensor* tensor);
void* first_element(const DLTensor* tensor) { return pullback_tensor_data(tensor); }
