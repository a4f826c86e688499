"""The structures of the PJRT C API, from XLA's public header `pjrt_c_api.h`: those that its
functions take, in the order of the table of functions. New ones are only ever added at the end.

    kind = STRUCTURES["Buffer_Dimensions"]   # a ctypes.Structure: buffer, dims, …
"""

import ctypes

MINOR = 93  # of version 0 of the API: what TABLE says
HEAD = 40  # bytes of the table before its first function: size, extensions, version

# Fields after (struct_size, extension_start). `name:i` is a C int, `name:b` a bool; all others are
# words: pointers and sizes.
TABLE = """
Error_Destroy: error
Error_Message: error message message_size
Error_GetCode: error code:i
Plugin_Initialize:
Plugin_Attributes: attributes num_attributes
Event_Destroy: event
Event_IsReady: event is_ready:b
Event_Error: event
Event_Await: event
Event_OnReady: event callback user_arg
Client_Create: create_options num_options kv_get_callback kv_get_user_arg kv_put_callback
    kv_put_user_arg client kv_try_get_callback kv_try_get_user_arg
Client_Destroy: client
Client_PlatformName: client platform_name platform_name_size
Client_ProcessIndex: client process_index:i
Client_PlatformVersion: client platform_version platform_version_size
Client_Devices: client devices num_devices
Client_AddressableDevices: client addressable_devices num_addressable_devices
Client_LookupDevice: client id:i device
Client_LookupAddressableDevice: client local_hardware_id:i addressable_device
Client_AddressableMemories: client addressable_memories num_addressable_memories
Client_Compile: client program compile_options compile_options_size executable
Client_DefaultDeviceAssignment: client num_replicas:i num_partitions:i default_assignment_size
    default_assignment
Client_BufferFromHostBuffer: client data type:i dims num_dims byte_strides num_byte_strides
    host_buffer_semantics:i device memory device_layout done_with_host_buffer buffer
DeviceDescription_Id: device_description id:i
DeviceDescription_ProcessIndex: device_description process_index:i
DeviceDescription_Attributes: device_description num_attributes attributes
DeviceDescription_Kind: device_description device_kind device_kind_size
DeviceDescription_DebugString: device_description debug_string debug_string_size
DeviceDescription_ToString: device_description to_string to_string_size
Device_GetDescription: device device_description
Device_IsAddressable: device is_addressable:b
Device_LocalHardwareId: device local_hardware_id:i
Device_AddressableMemories: device memories num_memories
Device_DefaultMemory: device memory
Device_MemoryStats: device bytes_in_use peak_bytes_in_use peak_bytes_in_use_is_set:b num_allocs
    num_allocs_is_set:b largest_alloc_size largest_alloc_size_is_set:b bytes_limit
    bytes_limit_is_set:b bytes_reserved bytes_reserved_is_set:b peak_bytes_reserved
    peak_bytes_reserved_is_set:b bytes_reservable_limit bytes_reservable_limit_is_set:b
    largest_free_block_bytes largest_free_block_bytes_is_set:b pool_bytes pool_bytes_is_set:b
    peak_pool_bytes peak_pool_bytes_is_set:b
Memory_Id: memory id:i
Memory_Kind: memory kind kind_size
Memory_DebugString: memory debug_string debug_string_size
Memory_ToString: memory to_string to_string_size
Memory_AddressableByDevices: memory devices num_devices
Executable_Destroy: executable
Executable_Name: executable executable_name executable_name_size
Executable_NumReplicas: executable num_replicas
Executable_NumPartitions: executable num_partitions
Executable_NumOutputs: executable num_outputs
Executable_SizeOfGeneratedCodeInBytes: executable size_in_bytes
Executable_GetCostAnalysis: executable num_properties properties
Executable_OutputMemoryKinds: executable num_outputs memory_kinds memory_kind_sizes
Executable_OptimizedProgram: executable program
Executable_Serialize: executable serialized_bytes serialized_bytes_size serialized_executable
    serialized_executable_deleter
LoadedExecutable_Destroy: executable
LoadedExecutable_GetExecutable: loaded_executable executable
LoadedExecutable_AddressableDevices: executable addressable_devices num_addressable_devices
LoadedExecutable_Delete: executable
LoadedExecutable_IsDeleted: executable is_deleted:b
LoadedExecutable_Execute: executable options argument_lists num_devices num_args output_lists
    device_complete_events execute_device
Executable_DeserializeAndLoad: client serialized_executable serialized_executable_size
    loaded_executable overridden_serialized_compile_options
    overridden_serialized_compile_options_size
LoadedExecutable_Fingerprint: executable executable_fingerprint executable_fingerprint_size
Buffer_Destroy: buffer
Buffer_ElementType: buffer type:i
Buffer_Dimensions: buffer dims num_dims
Buffer_UnpaddedDimensions: buffer unpadded_dims num_dims
Buffer_DynamicDimensionIndices: buffer dynamic_dim_indices num_dynamic_dims
Buffer_GetMemoryLayout: buffer layout_size layout_extension tiled_size tiled_extension
    minor_to_major minor_to_major_size tile_dims tile_dim_sizes num_tiles type:i
Buffer_OnDeviceSizeInBytes: buffer on_device_size_in_bytes
Buffer_Device: buffer device
Buffer_Memory: buffer memory
Buffer_Delete: buffer
Buffer_IsDeleted: buffer is_deleted:b
Buffer_CopyToDevice: buffer place dst_buffer
Buffer_ToHostBuffer: src host_layout dst dst_size event
Buffer_IsOnCpu: buffer is_on_cpu:b
Buffer_ReadyEvent: buffer event
Buffer_UnsafePointer: buffer buffer_pointer
Buffer_IncreaseExternalReferenceCount: buffer
Buffer_DecreaseExternalReferenceCount: buffer
Buffer_OpaqueDeviceMemoryDataPointer: buffer device_memory_ptr
CopyToDeviceStream_Destroy: stream
CopyToDeviceStream_AddChunk: stream chunk transfer_complete
CopyToDeviceStream_TotalBytes: stream total_bytes
CopyToDeviceStream_GranuleSize: stream granule_size_in_bytes
CopyToDeviceStream_CurrentBytes: stream current_bytes
TopologyDescription_Create: topology_name topology_name_size create_options num_options topology
TopologyDescription_Destroy: topology
TopologyDescription_PlatformName: topology platform_name platform_name_size
TopologyDescription_PlatformVersion: topology platform_version platform_version_size
TopologyDescription_GetDeviceDescriptions: topology descriptions num_descriptions
TopologyDescription_Serialize: topology serialized_bytes serialized_bytes_size serialized_topology
    serialized_topology_deleter
TopologyDescription_Attributes: topology attributes num_attributes
Compile: topology program compile_options compile_options_size client executable
Executable_OutputElementTypes: executable output_types num_output_types
Executable_OutputDimensions: executable num_outputs dims dim_sizes
Buffer_CopyToMemory: buffer place dst_buffer
Client_CreateViewOfDeviceBuffer: client device_buffer_ptr dims num_dims element_type:i layout
    device on_delete_callback on_delete_callback_arg stream buffer memory
Executable_Fingerprint: executable executable_fingerprint executable_fingerprint_size
Client_TopologyDescription: client topology
Executable_GetCompiledMemoryStats: executable generated_code_size_in_bytes argument_size_in_bytes
    output_size_in_bytes alias_size_in_bytes temp_size_in_bytes host_generated_code_size_in_bytes
    host_argument_size_in_bytes host_output_size_in_bytes host_alias_size_in_bytes
    host_temp_size_in_bytes peak_memory_in_bytes
Memory_Kind_Id: memory kind_id:i
ExecuteContext_Create: context
ExecuteContext_Destroy: context
Buffer_CopyRawToHost: buffer dst offset transfer_size event
AsyncHostToDeviceTransferManager_Destroy: transfer_manager
AsyncHostToDeviceTransferManager_TransferData: transfer_manager buffer_index:i data offset
    transfer_size is_last_transfer:b done_with_h2d_transfer
Client_CreateBuffersForAsyncHostToDevice: client shape_specs num_shape_specs device_layouts
    num_device_layouts memory transfer_manager
AsyncHostToDeviceTransferManager_RetrieveBuffer: transfer_manager buffer_index:i buffer_out
AsyncHostToDeviceTransferManager_Device: transfer_manager device_out
AsyncHostToDeviceTransferManager_BufferCount: transfer_manager buffer_count
AsyncHostToDeviceTransferManager_BufferSize: transfer_manager buffer_index:i buffer_size
AsyncHostToDeviceTransferManager_SetBufferError: transfer_manager buffer_index:i error_code:i
    error_message error_message_size
AsyncHostToDeviceTransferManager_AddMetadata: transfer_manager transfer_metadata num_metadata
Client_DmaMap: client data size
Client_DmaUnmap: client data
Client_CreateUninitializedBuffer: client shape_dims shape_num_dims shape_element_type:i
    shape_layout device memory buffer
Client_UpdateGlobalProcessInfo: client process_infos num_process_infos
TopologyDescription_Deserialize: serialized_topology serialized_topology_size topology
Client_CreateAliasBuffer: client memory shape_dims shape_num_dims shape_element_type:i
    shape_layout alias_buffer fulfill_alias_buffer_cb
Client_FulfillAliasBuffer: client buffer status_code:i error_message error_message_size
    fulfill_alias_buffer_cb
LoadedExecutable_GetDeviceAssignment: executable serialized_bytes serialized_bytes_size
    serialized_device_assignment serialized_device_assignment_deleter
Client_CreateErrorBuffer: client error_code:i error_message error_message_size shape_dims
    shape_num_dims shape_element_type:i shape_layout memory buffer
AsyncHostToDeviceTransferManager_TransferLiteral: transfer_manager buffer_index:i data shape_dims
    shape_num_dims shape_element_type:i shape_layout done_with_h2d_transfer
Buffer_CopyRawToHostFuture: buffer offset transfer_size event callback_data future_ready_callback
Device_PoisonExecution: device launch_id:i error_code:i error_message error_message_size
    poisoned:b
Device_CreateAsyncTrackingEvent: device description description_size event
AsyncTrackingEvent_Destroy: event
Executable_GetCompileOptions: executable serialized_bytes serialized_bytes_size
    serialized_compile_options serialized_compile_options_deleter
Buffer_DonateWithControlDependency: buffer callback_data dependency_ready_callback out_buffer
Event_Create: event
Event_Set: event error_code:i error_message error_message_size
Device_GetAttributes: device attributes num_attributes device_attributes attributes_deleter
"""
LAYOUTS_EXTENSION = 4  # its number among extensions
# Its functions: how arrays lie in memory, as text in XLA's syntax.
_LAYOUTS = """
Layouts_MemoryLayout_Destroy: layout
Layouts_MemoryLayout_Serialize: layout serialized_bytes serialized_bytes_size serialized_layout
    serialized_layout_deleter
Layouts_Client_GetDefaultLayout: client type:i dims num_dims layout
Layouts_Buffer_MemoryLayout: buffer layout
Layouts_Topology_GetDefaultLayout: topology type:i dims num_dims layout
Layouts_Executable_GetOutputLayouts: executable num_outputs output_layouts
Layouts_Executable_GetParameterLayouts: executable num_parameters parameter_layouts
"""
# structures that calls point to
_OTHERS = """
Program: code code_size format format_size
Buffer_MemoryLayout: tiled_size tiled_extension minor_to_major minor_to_major_size tile_dims
    tile_dim_sizes num_tiles type:i
ExecuteOptions: send_callbacks recv_callbacks num_send_ops num_recv_ops launch_id:i non_donatable
    num_non_donatable context call_location num_tasks task_ids incarnation_ids
NamedValue: name name_size type:i value value_size
"""
_KINDS = {"": ctypes.c_void_p, "i": ctypes.c_int, "b": ctypes.c_bool}


def _rows(text: str) -> dict[str, str]:
    lines = text.strip().replace("\n    ", " ").splitlines()
    return {name: fields for name, _, fields in (line.partition(":") for line in lines)}


def _structure(name: str, fields: str) -> type[ctypes.Structure]:
    parts = [f.partition(":") for f in fields.split()]
    members = [
        ("struct_size", ctypes.c_size_t),
        ("extension_start", ctypes.c_void_p),
        *((n, _KINDS[kind]) for n, _, kind in parts),
    ]
    return type(name, (ctypes.Structure,), {"_fields_": members})


FUNCTIONS = tuple(_rows(TABLE))
LAYOUTS = tuple(_rows(_LAYOUTS))
STRUCTURES = {
    name: _structure(name, fields)
    for name, fields in (_rows(TABLE) | _rows(_LAYOUTS) | _rows(_OTHERS)).items()
}
