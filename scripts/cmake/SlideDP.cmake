# Compile settings, dependencies and the three target functions of the tree.

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)

find_program(SLIDEDP_CCACHE ccache)
if(SLIDEDP_CCACHE)
  # Paths below the source folder count as relative: another clone finds the
  # same objects.
  set(CMAKE_CXX_COMPILER_LAUNCHER
      ${CMAKE_COMMAND} -E env CCACHE_BASEDIR=${PROJECT_SOURCE_DIR}
      CCACHE_NOHASHDIR=1 ${SLIDEDP_CCACHE})
endif()
find_program(SLIDEDP_MOLD mold)
if(SLIDEDP_MOLD)
  add_link_options(-fuse-ld=mold)
endif()

# A build from nothing is three times faster when a translation unit holds
# several sources of a target (CMAKE_UNITY_BUILD: presets asan, tsan, release, and
# what scripts/test configures; not "dev" and "cuda" otherwise, where rebuilding
# after a change matters). So no two sources of a target may define the same name,
# in unnamed namespaces either; those listed here stand alone, most of them because
# Highway includes them once per SIMD target.
set(CMAKE_UNITY_BUILD_BATCH_SIZE 8)
function(slidedp_stand_alone)
  set_source_files_properties(${ARGN} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
endfunction()

# -ffp-contract=off: every numeric path rounds where its source says so, so
# that SIMD targets and the scalar references agree bit for bit.
add_compile_options(
  "$<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra;-Werror=return-type;-Wno-unused-parameter;-ffp-contract=off>")
if(SLIDEDP_SANITIZE STREQUAL "address")
  add_compile_options(-fsanitize=address,undefined -fno-omit-frame-pointer
                      -fno-sanitize-recover=undefined)
  add_link_options(-fsanitize=address,undefined)
elseif(SLIDEDP_SANITIZE STREQUAL "thread")
  add_compile_options(-fsanitize=thread -fno-omit-frame-pointer)
  add_link_options(-fsanitize=thread)
elseif(NOT SLIDEDP_SANITIZE STREQUAL "")
  message(FATAL_ERROR "SLIDEDP_SANITIZE must be address, thread or empty, "
                      "not '${SLIDEDP_SANITIZE}'")
endif()

find_package(Threads REQUIRED)
find_package(absl REQUIRED)
find_package(Protobuf REQUIRED)
find_package(PkgConfig REQUIRED)
pkg_check_modules(GRPCPP REQUIRED IMPORTED_TARGET grpc++)
pkg_check_modules(OPENBLAS REQUIRED IMPORTED_TARGET openblas)
pkg_check_modules(HWY REQUIRED IMPORTED_TARGET libhwy)
pkg_check_modules(SQLITE3 REQUIRED IMPORTED_TARGET sqlite3)
pkg_check_modules(HWLOC REQUIRED IMPORTED_TARGET hwloc)
pkg_check_modules(NUMA REQUIRED IMPORTED_TARGET numa)
find_package(fmt REQUIRED)
find_package(spdlog REQUIRED)
find_package(nlohmann_json REQUIRED)
find_package(yaml-cpp REQUIRED)
find_package(CLI11 REQUIRED)
find_package(Boost 1.74 REQUIRED)
find_program(GRPC_CPP_PLUGIN grpc_cpp_plugin REQUIRED)

# slidedp_library(shm SOURCES a.cc b.cc DEPS slidedp::base absl::status)
function(slidedp_library name)
  cmake_parse_arguments(ARG "" "" "SOURCES;DEPS" ${ARGN})
  add_library(slidedp_${name} STATIC ${ARG_SOURCES})
  add_library(slidedp::${name} ALIAS slidedp_${name})
  target_include_directories(slidedp_${name} PUBLIC ${PROJECT_SOURCE_DIR})
  target_link_libraries(slidedp_${name} PUBLIC ${ARG_DEPS})
endfunction()

# slidedp_optimized(update)
# Also where the rest is not: sanitized code takes longer to compile than its
# tests to run, but for what works through arrays.
function(slidedp_optimized name)
  target_compile_options(slidedp_${name} PRIVATE
                         $<$<NOT:$<CONFIG:Release>>:-O1>)
endfunction()

# slidedp_binary(slidedpd SOURCES main.cc DEPS slidedp::daemon)
function(slidedp_binary name)
  cmake_parse_arguments(ARG "" "" "SOURCES;DEPS" ${ARGN})
  add_executable(${name} ${ARG_SOURCES})
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR})
  target_link_libraries(${name} PRIVATE ${ARG_DEPS})
endfunction()

# slidedp_test(words_test SOURCES words_test.cc DEPS slidedp::shm
#              LABELS pipeline TIMEOUT 60)
# One binary, one ctest entry. Label "pipeline" is what the tsan preset runs.
function(slidedp_test name)
  cmake_parse_arguments(ARG "" "TIMEOUT;COST" "SOURCES;DEPS;LABELS" ${ARGN})
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 300)  # for what hangs, under a sanitizer too
  endif()
  add_executable(${name} ${ARG_SOURCES})
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR})
  target_link_libraries(${name} PRIVATE ${ARG_DEPS} GTest::gmock
                                        GTest::gtest_main)
  add_test(NAME ${name} COMMAND ${name}
           WORKING_DIRECTORY ${PROJECT_SOURCE_DIR})
  set_tests_properties(${name} PROPERTIES TIMEOUT ${ARG_TIMEOUT}
                                          LABELS "${ARG_LABELS}")
  if(ARG_COST)  # the dearest begin first
    set_tests_properties(${name} PROPERTIES COST ${ARG_COST})
  endif()
endfunction()
