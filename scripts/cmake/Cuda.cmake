# CUDA, cuBLASLt, cuDNN with its frontend headers, NCCL. Included when
# SLIDEDP_CUDA is on.

if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
  set(CMAKE_CUDA_ARCHITECTURES 80 89 90)
endif()
if(NOT DEFINED CMAKE_CUDA_COMPILER)
  find_program(CMAKE_CUDA_COMPILER nvcc
               HINTS ENV CUDA_HOME ENV CUDACXX PATHS /usr/local/cuda
               PATH_SUFFIXES bin REQUIRED)
endif()
if(SLIDEDP_CCACHE)
  set(CMAKE_CUDA_COMPILER_LAUNCHER ${SLIDEDP_CCACHE})
endif()
enable_language(CUDA)
if(NOT DEFINED CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
  # CMake 3.25 does not know that nvcc 12 and newer take it.
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
endif()
set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
set(CMAKE_CUDA_EXTENSIONS OFF)
find_package(CUDAToolkit 12.5 REQUIRED)
add_compile_options("$<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-Wall>"
                    "$<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr>")

# slidedp_find_cuda_library(NCCL nccl.h nccl)
# -> target slidedp_cuda::NCCL
function(slidedp_find_cuda_library name header library)
  find_path(SLIDEDP_${name}_INCLUDE ${header}
            HINTS ${CUDAToolkit_INCLUDE_DIRS})
  find_library(SLIDEDP_${name}_LIBRARY ${library}
               HINTS ${CUDAToolkit_LIBRARY_DIR})
  if(NOT SLIDEDP_${name}_INCLUDE OR NOT SLIDEDP_${name}_LIBRARY)
    message(FATAL_ERROR
            "SLIDEDP_CUDA needs ${name} (${header}, lib${library}); install it "
            "or set SLIDEDP_${name}_INCLUDE and SLIDEDP_${name}_LIBRARY")
  endif()
  add_library(slidedp_cuda::${name} SHARED IMPORTED GLOBAL)
  set_target_properties(
    slidedp_cuda::${name} PROPERTIES
    IMPORTED_LOCATION ${SLIDEDP_${name}_LIBRARY}
    INTERFACE_INCLUDE_DIRECTORIES ${SLIDEDP_${name}_INCLUDE})
endfunction()

slidedp_find_cuda_library(NCCL nccl.h nccl)
slidedp_find_cuda_library(CUDNN cudnn.h cudnn)

# The frontend is headers only and comes as a Python wheel
# (scripts/requirements-cuda.txt).
set(SLIDEDP_CUDNN_FRONTEND_DIR "" CACHE PATH
    "Folder that holds cudnn_frontend.h; empty: looked for in .venv")
file(GLOB slidedp_venv_frontend
     ${PROJECT_SOURCE_DIR}/.venv/lib/python3*/site-packages/include
     ${PROJECT_SOURCE_DIR}/.venv/include)
find_path(SLIDEDP_CUDNN_FRONTEND_INCLUDE cudnn_frontend.h
          HINTS ${SLIDEDP_CUDNN_FRONTEND_DIR} ${slidedp_venv_frontend}
          PATH_SUFFIXES include)
if(NOT SLIDEDP_CUDNN_FRONTEND_INCLUDE)
  message(FATAL_ERROR
          "SLIDEDP_CUDA needs cudnn_frontend.h: install "
          "scripts/requirements-cuda.txt into .venv, or set "
          "SLIDEDP_CUDNN_FRONTEND_DIR")
endif()
add_library(slidedp_cuda_frontend INTERFACE)
add_library(slidedp_cuda::FRONTEND ALIAS slidedp_cuda_frontend)
target_include_directories(slidedp_cuda_frontend SYSTEM
                           INTERFACE ${SLIDEDP_CUDNN_FRONTEND_INCLUDE})
target_compile_definitions(slidedp_cuda_frontend
                           INTERFACE CUDNN_FRONTEND_SKIP_JSON_LIB)
target_link_libraries(slidedp_cuda_frontend INTERFACE slidedp_cuda::CUDNN)

# Release binaries find the private libraries of scripts/bundle beside them, and
# in lib/cuda the links to the machine's CUDA libraries that its link-cuda makes.
# RPATH and not RUNPATH: it also serves the libraries' own dependencies.
add_link_options(-Wl,--disable-new-dtags)
list(APPEND CMAKE_BUILD_RPATH "$ORIGIN/../lib" "$ORIGIN/../lib/cuda")
