# Library, headers, find_package(pullback), pkg-config.
include(CMakePackageConfigHelpers)

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/pullback)
install(TARGETS pullback EXPORT pullbackTargets
        LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(DIRECTORY include/pullback DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}
        FILES_MATCHING PATTERN "*.h" PATTERN "*.hpp")
install(EXPORT pullbackTargets NAMESPACE pullback:: DESTINATION ${package_dir})

configure_package_config_file(cmake/pullbackConfig.cmake.in pullbackConfig.cmake
                              INSTALL_DESTINATION ${package_dir} NO_SET_AND_CHECK_MACRO)
# Before 1.0 a minor version may break.
write_basic_package_version_file(pullbackConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/pullbackConfig.cmake
              ${PROJECT_BINARY_DIR}/pullbackConfigVersion.cmake DESTINATION ${package_dir})

# Relative to where the .pc file lies, so that the prefix may move.
file(RELATIVE_PATH PULLBACK_PC_PREFIX
     ${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig ${CMAKE_INSTALL_PREFIX})
configure_file(cmake/pullback.pc.in pullback.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/pullback.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
