"""Shows GPU memory that is known by its address to torch, without importing it."""

from mini_infer_engine.kv_transfer.layout import KVMemory


class DeviceBytes:
    """The bytes of a pool on a GPU, in a form that torch wraps as a tensor (CUDA array interface)."""

    def __init__(self, memory: KVMemory) -> None:
        self.__cuda_array_interface__ = {
            "shape": (memory.size,),
            "typestr": "|u1",
            "data": (memory.address, False),
            "version": 3,
        }
