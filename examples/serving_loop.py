"""A serving loop on the KV cache: chunked prefill, shared prefixes, continuous batching; no token depends on them."""

import torch

import helion_attn as ha

device = "cuda" if torch.cuda.is_available() else "cpu"
H, H_kv, D, vocabulary = 4, 1, 64, 1000
cache = ha.paged_kv_cache(num_pages=8, H_kv=H_kv, D=D, device=device)
free, page = list(range(8)), cache.page_size  # pages that nobody has; keys of one
shared: dict[tuple[int, ...], int] = {}  # whole pages, by all tokens up to their end
# In place of a model: the query, key and value of each token, and what says which comes next.
g = torch.Generator().manual_seed(0)
tables = [torch.randn(vocabulary, heads, D, generator=g).to(device, torch.bfloat16) for heads in (H, H_kv, H_kv)]
unembed = torch.randn(H * D, vocabulary, generator=g).to(device)


class Sequence:
    """A prompt, the tokens that follow it, and the pages of both."""

    def __init__(self, prompt: list[int], new_tokens: int, chunk: int) -> None:
        self.tokens, self.end, self.chunk = list(prompt), len(prompt) + new_tokens, chunk
        # The prompt's first pages may be there. At least one token has to run.
        prefixes = [tuple(prompt[:end]) for end in range(page, len(prompt), page)]
        self.pages = [shared[prefix] for prefix in prefixes if prefix in shared]
        self.stored = page * len(self.pages)  # keys in the cache

    def next_tokens(self) -> int:
        """Of its next step: a chunk of the prompt, or the newest one."""
        return min(self.chunk, len(self.tokens) - self.stored) if len(self.tokens) < self.end else 0


def step(batch: list[Sequence], length: int) -> None:
    """Run the next `length` tokens of each sequence."""
    for s in batch:
        while page * len(s.pages) < s.stored + length:
            s.pages.append(free.pop())
    rows = [[*s.pages, 0, 0, 0][:4] for s in batch]  # up to four pages each
    block_table = torch.tensor(rows, dtype=torch.int32, device=device)
    lengths = torch.tensor([s.stored for s in batch], dtype=torch.int32, device=device)
    tokens = torch.tensor([s.tokens[s.stored : s.stored + length] for s in batch], device=device)
    q, k, v = (table[tokens].transpose(1, 2) for table in tables)  # [B, heads, length, D]
    pages = ha.append_kvcache(cache, k, v, block_table, lengths)
    out = ha.attention_kvcache(q, cache, block_table, lengths + length, open_pages=pages, num_splits=1)
    for s, last in zip(batch, out[:, :, -1].flatten(1), strict=True):
        s.stored += length
        for i in range(s.stored // page):  # another may have come first
            shared.setdefault(tuple(s.tokens[: page * (i + 1)]), s.pages[i])
        if s.stored == len(s.tokens):
            s.tokens.append(int((last.float() @ unembed).argmax()))
        if s.next_tokens() == 0:  # it has ended: others may have what is not shared
            free.extend(set(s.pages) - {*shared.values()})


def serve(arrivals: dict[int, tuple[list[int], int, int]]) -> list[Sequence]:
    """Sequences by the step at which they come, those with as many tokens to run together."""
    sequences: list[Sequence] = []
    for clock in range(6):
        sequences += [Sequence(*arrivals[clock])] if clock in arrivals else []
        for length in sorted({s.next_tokens() for s in sequences} - {0}):
            step([s for s in sequences if s.next_tokens() == length], length)
    return sequences


prompt = torch.randint(vocabulary, (300,), generator=g).tolist()
served = serve({0: (prompt, 4, 192), 2: (prompt[:280], 3, 192)})  # the second finds two pages of the first
free.extend(shared.values())  # prefixes stay there until somebody wants their pages
shared.clear()
alone = serve({0: (prompt, 4, 300)})  # in one chunk: the same bits, and so the same tokens
print(f"{served[0].tokens[-4:]} in chunks and batches, {alone[0].tokens[-4:]} alone")
