#pragma once

#include <c10/core/Device.h>
#include <c10/util/Exception.h>

#include "cuda_on_cpu.h"
