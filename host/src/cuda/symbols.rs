//! The driver functions that this program may call, as data.
//!
//! The first group is every function that `cust` 0.3.2 references; leaving one out is a link error, so
//! the list cannot fall behind. The second group is what [`super::raw`] adds: newer than `cust`'s
//! bindings, or wanted with its true error code.

/// Hands the list of names to the macro `$then`.
macro_rules! driver_symbols {
    ($then:ident) => {
        $then! {
            // What cust references.
            cuArray3DCreate_v2 cuArray3DGetDescriptor_v2 cuArrayDestroy
            cuCtxCreate_v2 cuCtxDestroy_v2 cuCtxGetApiVersion cuCtxGetCacheConfig cuCtxGetCurrent cuCtxGetDevice
            cuCtxGetFlags cuCtxGetLimit cuCtxGetSharedMemConfig cuCtxGetStreamPriorityRange cuCtxPopCurrent_v2
            cuCtxPushCurrent_v2 cuCtxSetCacheConfig cuCtxSetCurrent cuCtxSetLimit cuCtxSetSharedMemConfig
            cuCtxSynchronize
            cuDestroyExternalMemory
            cuDeviceGet cuDeviceGetAttribute cuDeviceGetCount cuDeviceGetName cuDevicePrimaryCtxRelease_v2
            cuDevicePrimaryCtxReset_v2 cuDevicePrimaryCtxRetain cuDevicePrimaryCtxSetFlags_v2 cuDeviceTotalMem_v2
            cuDriverGetVersion
            cuEventCreate cuEventDestroy_v2 cuEventElapsedTime cuEventQuery cuEventRecord cuEventSynchronize
            cuExternalMemoryGetMappedBuffer
            cuFuncGetAttribute cuFuncSetCacheConfig cuFuncSetSharedMemConfig
            cuGetErrorString
            cuGraphAddKernelNode cuGraphCreate cuGraphDebugDotPrint cuGraphDestroy cuGraphGetEdges cuGraphGetNodes
            cuGraphKernelNodeGetParams cuGraphNodeGetType
            cuImportExternalMemory cuInit
            cuLaunchHostFunc cuLaunchKernel
            cuLinkAddData_v2 cuLinkComplete cuLinkCreate_v2 cuLinkDestroy
            cuMemAdvise cuMemAllocAsync cuMemAllocHost_v2 cuMemAllocManaged cuMemAlloc_v2 cuMemFreeAsync
            cuMemFreeHost cuMemFree_v2 cuMemGetInfo_v2 cuMemPrefetchAsync
            cuMemcpy2D_v2 cuMemcpyAtoH_v2 cuMemcpyDtoDAsync_v2 cuMemcpyDtoD_v2 cuMemcpyDtoHAsync_v2
            cuMemcpyDtoH_v2 cuMemcpyHtoA_v2 cuMemcpyHtoDAsync_v2 cuMemcpyHtoD_v2
            cuMemsetD16Async cuMemsetD16_v2 cuMemsetD32Async cuMemsetD32_v2 cuMemsetD8Async cuMemsetD8_v2
            cuModuleGetFunction cuModuleGetGlobal_v2 cuModuleLoad cuModuleLoadData cuModuleLoadDataEx
            cuModuleUnload
            cuOccupancyAvailableDynamicSMemPerBlock cuOccupancyMaxActiveBlocksPerMultiprocessor
            cuOccupancyMaxPotentialBlockSize
            cuStreamCreateWithPriority cuStreamDestroy_v2 cuStreamGetFlags cuStreamGetPriority
            cuStreamSynchronize cuStreamWaitEvent
            cuSurfObjectCreate cuSurfObjectDestroy cuSurfObjectGetResourceDesc
            cuTexObjectCreate cuTexObjectDestroy cuTexObjectGetResourceDesc cuTexObjectGetResourceViewDesc
            // What `raw` adds.
            cuDeviceGetUuid_v2 cuFuncSetAttribute cuGetErrorName cuGraphExecDestroy cuGraphInstantiateWithFlags
            cuGraphLaunch cuLaunchKernelEx cuMemHostRegister_v2 cuMemHostUnregister cuStreamBeginCapture_v2
            cuStreamEndCapture
        }
    };
}
pub(super) use driver_symbols;
