# What `find_package(tvmflow)` reads: the target `tvmflow` and the libraries that it is linked with.
include("${CMAKE_CURRENT_LIST_DIR}/dependencies.cmake")
include("${CMAKE_CURRENT_LIST_DIR}/tvmflowTargets.cmake")
