"""The header that ranks exchange before a call, so that they raise together and none waits forever.

Every rank sends `HEADER_BYTES`, whatever its arguments are, also where it refuses them. So no rank can disagree on
whether there is a header, and one that raises tells the others why.
"""

from __future__ import annotations

import functools
import json
import struct
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from helion_attn.distributed import collectives

HEADER_BYTES = 1024

#: Query length, key length, whether the rank refuses the call, bytes of text.
_NUMBERS = struct.Struct("<qqqq")

_TEXT_BYTES = HEADER_BYTES - _NUMBERS.size


class Header(NamedTuple):
    """A rank's call."""

    M: int  # its query length
    N: int  # its key length
    refused: bool  # it raises
    text: str  # why, or what ranks must agree on, as JSON

    def encode(self) -> bytearray:
        """`HEADER_BYTES`."""
        text = self.text.encode()
        if self.refused:
            text = text[:_TEXT_BYTES]
        elif len(text) > _TEXT_BYTES:
            raise ValueError(f"a header has {len(text)} bytes of text; there is room for {_TEXT_BYTES}")
        return bytearray(_NUMBERS.pack(self.M, self.N, self.refused, len(text)) + text.ljust(_TEXT_BYTES, b"\0"))


def decode(data: bytes) -> Header:
    """What `Header.encode` made."""
    M, N, refused, size = _NUMBERS.unpack_from(data)
    text = data[_NUMBERS.size : _NUMBERS.size + size].decode(errors="replace")
    return Header(M, N, bool(refused), text)


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _disagreements(agreed: list[dict[str, Any]]) -> list[str]:
    """A line for each thing that ranks have different values of."""
    lines = []
    for name in agreed[0]:
        values: dict[str, list[int]] = {}
        for rank, of_rank in enumerate(agreed):
            values.setdefault(json.dumps(of_rank.get(name)), []).append(rank)
        if len(values) > 1:
            lines.append(f"{name} is " + " and ".join(f"{value} on {_ranks(on)}" for value, on in values.items()))
    return lines


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def aside(device: torch.device) -> AbstractContextManager[object]:
    """Inside, the host waits for what it launches there, and not for what else a GPU has to do."""
    return torch.cuda.stream(_stream(device)) if device.type == "cuda" else nullcontext()


def exchange(own: Header, group: dist.ProcessGroup) -> list[Header]:
    """The headers of all ranks.

    Raises:
        ValueError: on all ranks, if one refuses its call, or if two disagree: naming them. But for the one that
            refuses, which raises what it has to.
    """
    device = collectives.device_of(group)
    with aside(device):
        sent = torch.frombuffer(own.encode(), dtype=torch.uint8).to(device)
        received = bytes(collectives.gather(sent, group).cpu().view(-1).tolist())
    headers = [decode(received[i : i + HEADER_BYTES]) for i in range(0, len(received), HEADER_BYTES)]
    if own.refused:
        return headers
    if refusals := [f"rank {rank}: {h.text}" for rank, h in enumerate(headers) if h.refused]:
        raise ValueError(f"other ranks refuse their arguments: {'; '.join(refusals)}")
    if any(h.text != own.text for h in headers):
        lines = _disagreements([json.loads(h.text) for h in headers])
        raise ValueError(f"the ranks disagree: {'; '.join(lines)}")
    return headers
