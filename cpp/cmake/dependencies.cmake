# Finds the libraries that the tvmflow library is linked with. Each adds little to a static program, which uses a small
# part of it; the shared libarchive needs ten other libraries.
if(NOT DEFINED TVMFLOW_STATIC OR TVMFLOW_STATIC)
  set(TVMFLOW_LIBRARY_SUFFIXES ${CMAKE_FIND_LIBRARY_SUFFIXES})
  set(CMAKE_FIND_LIBRARY_SUFFIXES .a ${TVMFLOW_LIBRARY_SUFFIXES})
endif()
find_package(LibArchive REQUIRED)
find_package(OpenSSL REQUIRED COMPONENTS Crypto)
find_package(ZLIB REQUIRED)
if(DEFINED TVMFLOW_LIBRARY_SUFFIXES)
  set(CMAKE_FIND_LIBRARY_SUFFIXES ${TVMFLOW_LIBRARY_SUFFIXES})
endif()
