# The shared library shows the C ABI and the C++ API, and nothing else: no symbol of its
# dependencies, of the standard library's templates, or of its own insides.
execute_process(COMMAND ${NM} --dynamic --defined-only --demangle ${LIBRARY}
                OUTPUT_VARIABLE symbols COMMAND_ERROR_IS_FATAL ANY)
string(REGEX REPLACE ";" "" symbols "${symbols}")
string(REGEX MATCHALL "[^\n]+" symbols "${symbols}")
set(c_functions 0)
foreach(line ${symbols})
  string(REGEX REPLACE "^[0-9a-f]+ . " "" symbol "${line}")
  if(symbol MATCHES "^pullback_[a-z_]+$")
    math(EXPR c_functions "${c_functions} + 1")
  elseif(NOT symbol MATCHES "^((typeinfo|typeinfo name|vtable) for )?pullback::[A-Za-z_]+")
    message(SEND_ERROR "${LIBRARY} exports ${symbol}")
  endif()
  if(symbol MATCHES "^pullback::(capi|driver|N_[A-Z0-9]+|Checker|CheckedBody)::")
    message(SEND_ERROR "${LIBRARY} exports the internal ${symbol}")
  endif()
endforeach()

# Every function that the headers declare is there.
file(GLOB headers ${HEADERS}/*.h)
set(declared_functions 0)
foreach(header ${headers})
  file(READ ${header} text)
  string(REGEX MATCHALL "PULLBACK_API [^;(]*[ *\n](pullback_[a-z_]+)\\(" declared "${text}")
  list(LENGTH declared count)
  math(EXPR declared_functions "${declared_functions} + ${count}")
endforeach()
if(NOT c_functions EQUAL declared_functions)
  message(SEND_ERROR "the C headers declare ${declared_functions} functions, "
                     "${LIBRARY} exports ${c_functions}")
endif()
