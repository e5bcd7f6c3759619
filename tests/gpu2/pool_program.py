"""A process that holds a page pool on its GPU, tells how it is mapped, and answers for what is in it until it ends.

    python -m tests.gpu2.pool_program NUM_PAGES

Standard input: `sum PAGE`, answered with the sum of the page's bytes.
"""

import base64
import sys

import msgspec
import torch

from mini_infer_engine.config.errors import ModelError
from mini_infer_engine.kv_transfer.layout import KVLayout, KVMemory
from mini_infer_engine.kv_transfer.transport import TransportChoice
from mini_infer_engine.kv_transfer.transports.open_transport import open_transport

LAYOUT = KVLayout(num_layers=4, halves=2, page_size=128, num_heads=4, head_bytes=256, dtype="bfloat16")


def memory_of(pages: torch.Tensor) -> KVMemory:
    """The pool [pages, bytes]."""
    return KVMemory(
        address=pages.data_ptr(),
        num_pages=pages.shape[0],
        device="cuda",
        device_index=pages.device.index,
        layout=LAYOUT,
    )


def main() -> None:
    """See the module."""
    # Behind another tensor of the same allocation: a handle is of the whole.
    whole = torch.zeros((int(sys.argv[1]) + 1, LAYOUT.page_bytes), dtype=torch.uint8, device="cuda")
    pages = whole[1:]
    pages[:] = torch.arange(pages.shape[0], device="cuda")[:, None] % 256
    torch.cuda.synchronize()
    try:
        transport = open_transport(TransportChoice("cuda-ipc"), "holder", memory_of(pages))
    except ModelError as error:
        print(f"refused: {error}", flush=True)
        return
    print(base64.b64encode(msgspec.msgpack.encode(transport.describe())).decode(), flush=True)
    for line in sys.stdin:
        torch.cuda.synchronize()
        print(int(pages[int(line.split()[1])].sum(dtype=torch.int64)), flush=True)


if __name__ == "__main__":
    main()
