/* The gradient of sparsemax. x = (2, 1.5, -1) gives tau = 1.25 and y = (0.75, 0.25, 0); its
 * gradient is d_y minus the mean of d_y over the support, and 0 outside of it. */
#include <pullback/pullback.h>
#include <stdio.h>
#include <stdlib.h>

static void check(pullback_status status) {
  if (status == PULLBACK_OK) return;
  fprintf(stderr, "%s\n", pullback_last_error());
  exit(1);
}

static void expect(const char* name, const float* got, const float* expected) {
  int i;
  for (i = 0; i < 3; ++i) {
    if (got[i] != expected[i]) {
      fprintf(stderr, "%s[%d]: expected %g, got %g\n", name, i, expected[i], got[i]);
      exit(1);
    }
  }
}

static void run(const pullback_entmax_problem* problem, pullback_pass pass,
                const pullback_entmax_tensors* tensors) {
  pullback_plan* plan = NULL;
  size_t bytes = 0;
  char* memory;
  check(pullback_entmax_plan(problem, pass, NULL, &plan));
  check(pullback_plan_workspace_bytes(plan, &bytes));
  memory = malloc(bytes + PULLBACK_WORKSPACE_ALIGNMENT);
  if (memory == NULL) exit(1);
  check(pullback_entmax_run(
      plan, NULL, tensors,
      memory + PULLBACK_WORKSPACE_ALIGNMENT - (uintptr_t)memory % PULLBACK_WORKSPACE_ALIGNMENT,
      bytes));
  free(memory);
  pullback_plan_destroy(plan);
}

int main(void) {
  const float x[3] = {2, 1.5f, -1}, d_y[3] = {1, 0, 5};
  const float expected_y[3] = {0.75f, 0.25f, 0}, expected_d_x[3] = {0.5f, -0.5f, 0};
  float y[3], d_x[3];
  int64_t shape[1] = {3};
  DLTensor row = {0};
  pullback_entmax_problem problem = PULLBACK_ENTMAX_PROBLEM_INIT;
  pullback_entmax_tensors tensors = PULLBACK_ENTMAX_TENSORS_INIT;

  row.device.device_type = kDLCPU;
  row.ndim = 1;
  row.shape = shape;
  row.dtype.code = kDLFloat;
  row.dtype.bits = 32;
  row.dtype.lanes = 1;
  problem.x = &row;
  problem.d_y = &row;

  tensors.x = x;
  tensors.y = y;
  run(&problem, PULLBACK_FORWARD, &tensors);
  expect("y", y, expected_y);
  tensors.d_y = d_y;
  tensors.d_x = d_x;
  run(&problem, PULLBACK_BACKWARD, &tensors);
  expect("d_x", d_x, expected_d_x);
  return 0;
}
