"""Functions with the names and signatures of flash-attn, torch_scatter and entmax.

Change the import, keep the code. What differs from the originals:

flash_attn_func, flash_attn_varlen_func, and both with _qkvpacked and _kvpacked
    Any dtype, on the CPU too, head dims of q and v may differ; lse is -inf (not +inf) for rows
    that see nothing. The third value with return_attn_probs is None. Refused are block_table (paged
    KV) and alibi_slopes: `pullback.torch.attention` takes them as a bias, and gives its gradient.
segment_*, gather_*
    Floating-point src only (gather_* take any). NaN wins in min and max, and the first of equal
    values gets the gradient on every device. An empty segment has value 0 and argument N, as there.
    An index that is out of range or does not ascend is an error on the CPU (of gather_coo, the
    latter in its backward pass); on a GPU, where looking would wait, its results mean nothing.
    `out` of a segment_*_csr without rows is zeros, not left as it is.
    `out` has the result's shape, need not be contiguous and keeps its gradient; its value counts as
    one more row of a segment_*_coo, with argument N, and is taken before rows of the same value.
    The scatter_* functions are not here: for ids in any order there is
    `pullback.torch.segment_permutation`.
sparsemax, entmax15, entmax_bisect, sparsemax_bisect
    Exact thresholds: `k`, `n_iter` and `ensure_sum_one` are accepted and not needed. A row of -inf
    gives zeros instead of NaN. alpha 1 is softmax. entmax_bisect's gradient of alpha has its shape.
    normmax_bisect, budget_bisect and the losses are not here.
"""

from __future__ import annotations

from ._entmax import (
    Entmax15,
    EntmaxBisect,
    Sparsemax,
    SparsemaxBisect,
    entmax15,
    entmax_bisect,
    sparsemax,
    sparsemax_bisect,
)
from ._flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from ._torch_scatter import (
    gather_coo,
    gather_csr,
    segment_add_coo,
    segment_add_csr,
    segment_coo,
    segment_csr,
    segment_max_coo,
    segment_max_csr,
    segment_mean_coo,
    segment_mean_csr,
    segment_min_coo,
    segment_min_csr,
    segment_sum_coo,
    segment_sum_csr,
)

__all__ = [
    "Entmax15",
    "EntmaxBisect",
    "Sparsemax",
    "SparsemaxBisect",
    "entmax15",
    "entmax_bisect",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "gather_coo",
    "gather_csr",
    "segment_add_coo",
    "segment_add_csr",
    "segment_coo",
    "segment_csr",
    "segment_max_coo",
    "segment_max_csr",
    "segment_mean_coo",
    "segment_mean_csr",
    "segment_min_coo",
    "segment_min_csr",
    "segment_sum_coo",
    "segment_sum_csr",
    "sparsemax",
    "sparsemax_bisect",
]

# By which pickles and messages know them.
for _public in __all__:
    globals()[_public].__module__ = __name__
