# Writes device_sources.inc: every device source as {"include/path.cuh", "text"sv}. Long texts are cut
# into pieces because compilers limit the length of one string literal; sv spares them counting it.
#   cmake -DROOT=src -DOUTPUT=device_sources.inc -P embed_device_sources.cmake
file(GLOB_RECURSE files RELATIVE ${ROOT} ${ROOT}/device/*.cuh ${ROOT}/ops/*/*.cuh
     ${ROOT}/ops/*/cuda/tuning.hpp)
list(SORT files)
set(result "")
foreach(file ${files})
  file(READ ${ROOT}/${file} text)
  string(APPEND result "{\"${file}\",")
  string(LENGTH "${text}" length)
  set(begin 0)
  while(begin LESS length)
    string(SUBSTRING "${text}" ${begin} 8000 piece)
    string(APPEND result "\nR\"__pullback__(${piece})__pullback__\"")
    math(EXPR begin "${begin} + 8000")
  endwhile()
  string(APPEND result "sv},\n")
endforeach()
file(CONFIGURE OUTPUT ${OUTPUT} CONTENT "@result@" @ONLY)
