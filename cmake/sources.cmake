# A file belongs to the build by where it lies; a new one needs no entry here.
file(GLOB PULLBACK_SOURCES CONFIGURE_DEPENDS src/core/*.cpp src/cpu/*.cpp src/ops/*/*.cpp
     src/ops/*/cpu/*.cpp src/ops/*/cuda/*.cpp src/cuda/*.cpp src/capi/*.cpp)
file(GLOB PULLBACK_DRIVER_SOURCES CONFIGURE_DEPENDS src/driver/*.cpp tests/ops/*/*cases.cpp
     tests/ops/*/cuda_bench.cpp)

# The ops that the driver knows: one line PULLBACK_OP(name) for each with a case list.
file(GLOB case_files CONFIGURE_DEPENDS tests/ops/*/cases.cpp)
set(PULLBACK_OPS "")
set(op_list "")
foreach(case_file ${case_files})
  cmake_path(GET case_file PARENT_PATH folder)
  cmake_path(GET folder FILENAME op)
  list(APPEND PULLBACK_OPS ${op})
  string(APPEND op_list "PULLBACK_OP(${op})\n")
endforeach()
file(CONFIGURE OUTPUT ${PROJECT_BINARY_DIR}/generated/op_list.inc CONTENT "${op_list}")

# The ops with benchmarks for GPUs: one line PULLBACK_CUDA_BENCH(name) each.
file(GLOB bench_files RELATIVE ${PROJECT_SOURCE_DIR}/tests/ops CONFIGURE_DEPENDS
     tests/ops/*/cuda_bench.cpp)
list(TRANSFORM bench_files REPLACE "/cuda_bench[.]cpp$" ")\n")
list(TRANSFORM bench_files PREPEND "PULLBACK_CUDA_BENCH(")
list(JOIN bench_files "" cuda_bench_list)
file(CONFIGURE OUTPUT ${PROJECT_BINARY_DIR}/generated/cuda_bench_list.inc CONTENT "${cuda_bench_list}")

# Every file in an op's cuda folder offers its kernels: one line PULLBACK_CUDA_PART(op, file).
file(GLOB cuda_files RELATIVE ${PROJECT_SOURCE_DIR}/src/ops CONFIGURE_DEPENDS src/ops/*/cuda/*.cpp)
set(cuda_part_list "")
foreach(cuda_file ${cuda_files})
  string(REGEX REPLACE "^([^/]+)/cuda/(.+)[.]cpp$" "PULLBACK_CUDA_PART(\\1, \\2)\n" line ${cuda_file})
  string(APPEND cuda_part_list "${line}")
endforeach()
file(CONFIGURE OUTPUT ${PROJECT_BINARY_DIR}/generated/cuda_part_list.inc CONTENT "${cuda_part_list}")
