# Installs into a temporary prefix, moves the prefix, and builds and runs an outside project there,
# which finds the library by find_package and by pkg-config.
file(REMOVE_RECURSE ${WORK})
execute_process(COMMAND ${CMAKE_COMMAND} --install ${BUILD} --prefix ${WORK}/prefix
                OUTPUT_QUIET COMMAND_ERROR_IS_FATAL ANY)
file(RENAME ${WORK}/prefix ${WORK}/moved)
execute_process(
  COMMAND ${CMAKE_CTEST_COMMAND} --build-and-test ${SOURCE}/outside ${WORK}/build
          --build-generator ${GENERATOR} --build-noclean
          --build-options -DCMAKE_PREFIX_PATH=${WORK}/moved -DCMAKE_C_COMPILER=${C_COMPILER}
          -DCMAKE_CXX_COMPILER=${CXX_COMPILER}
          --test-command ${CMAKE_CTEST_COMMAND} --output-on-failure
  OUTPUT_VARIABLE output ERROR_VARIABLE output RESULT_VARIABLE failed)
if(failed)
  message(FATAL_ERROR "${output}")
endif()
