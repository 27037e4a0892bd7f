"""An 8-billion-parameter Llama's layers by torch on GPUs, by the method of `decode_rate`: what our layers there are compared with.

    torchrun --nproc-per-node 2 benches/peers/torch_llama.py [--layers 8] [--sequences 1,8,64] [--prompt 512] [--passes 20]
        [--prefill 128,512] [--json FILE]

Shapes as in `decode_rate`, bf16, random weights, sharded as in Megatron-LM: two all-reduces of NCCL a layer, logits
gathered. Attention by scaled_dot_product_attention with grouped heads. A pass is one CUDA graph, timed by events around its replay.
One line of JSON for each number of sequences and each prompt: microseconds. `--device cpu` runs it with Gloo and without graphs, to
try it.
"""
import os
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as functional

import passes

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, THETA = 4096, 14336, 32, 8, 128, 500_000.0


class Llama:
    """This rank's part of the model, and one cache for all sequences."""

    def __init__(self, layers, sequences, capacity, device):
        self.world, self.device = dist.get_world_size(), device
        self.heads, self.kv_heads = HEADS // self.world, KV_HEADS // self.world

        def weight(rows, columns):
            return torch.randn(rows, columns, device=device, dtype=torch.bfloat16) * 0.02

        def cache():
            return torch.zeros(sequences, self.kv_heads, capacity, HEAD_DIM, device=device, dtype=torch.bfloat16)

        inner, query = INNER // self.world, self.heads * HEAD_DIM
        self.layers = [
            {
                "qkv": weight(query + 2 * self.kv_heads * HEAD_DIM, HIDDEN), "out": weight(HIDDEN, query),
                "gate_up": weight(2 * inner, HIDDEN), "down": weight(HIDDEN, inner), "keys": cache(), "values": cache(),
            }
            for _ in range(layers)
        ]
        self.embedding, self.head = weight(passes.VOCABULARY, HIDDEN), weight(passes.VOCABULARY // self.world, HIDDEN)
        self.norm = torch.ones(HIDDEN, device=device, dtype=torch.bfloat16)
        frequencies = THETA ** (-torch.arange(0, HEAD_DIM, 2, device=device) / HEAD_DIM)
        angles = torch.arange(capacity, device=device)[:, None] * frequencies
        self.cos, self.sin = angles.cos().bfloat16(), angles.sin().bfloat16()
        self.gathered = torch.empty(self.world * sequences, passes.VOCABULARY // self.world, device=device, dtype=torch.bfloat16)

    def forward(self, ids, start):
        """Logits after the last of `ids[sequences, tokens]`, which are at the positions from `start` on."""
        sequences, tokens = ids.shape
        end = start + tokens
        cos, sin = self.cos[start:end], self.sin[start:end]

        def rotated(x):
            first, second = x.chunk(2, -1)
            return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

        def normed(x):
            return functional.rms_norm(x, (HIDDEN,), self.norm, 1e-5)

        def summed(x):
            if self.world > 1:
                dist.all_reduce(x)
            return x

        x = self.embedding[ids]
        for layer in self.layers:
            qkv = functional.linear(normed(x), layer["qkv"]).view(sequences, tokens, -1, HEAD_DIM).transpose(1, 2)
            query, key, value = qkv.split([self.heads, self.kv_heads, self.kv_heads], 1)
            layer["keys"][:, :, start:end] = rotated(key)
            layer["values"][:, :, start:end] = value
            attended = functional.scaled_dot_product_attention(
                rotated(query), layer["keys"][:, :, :end], layer["values"][:, :, :end], is_causal=tokens > 1, enable_gqa=True
            )
            x = x + summed(functional.linear(attended.transpose(1, 2).reshape(sequences, tokens, -1), layer["out"]))
            gate, up = functional.linear(normed(x), layer["gate_up"]).chunk(2, -1)
            x = x + summed(functional.linear(functional.silu(gate) * up, layer["down"]))
        logits = functional.linear(normed(x[:, -1]), self.head)
        if self.world > 1:
            dist.all_gather_into_tensor(self.gathered, logits)
        return logits


def seconds(work, count, device):
    """The seconds of `count` runs of `work`, which is captured where it can be."""
    if device.type == "cpu":
        times = []
        for _ in range(count):
            dist.barrier()
            began = time.perf_counter()
            work()
            times.append(time.perf_counter() - began)
        return times
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    times = []
    for _ in range(count):
        dist.barrier()
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return times


def main():
    parser = passes.flags(__doc__)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    arguments = parser.parse_args()
    local = int(os.environ["LOCAL_RANK"])
    if arguments.device == "cuda":
        torch.cuda.set_device(local)
        device = torch.device("cuda", local)
        dist.init_process_group("nccl", device_id=device)
    else:
        torch.set_num_threads(arguments.threads)
        device = torch.device("cpu")
        dist.init_process_group("gloo")

    def decode(n):
        model = Llama(arguments.layers, n, arguments.prompt + 1, device)
        ids = torch.full((n, 1), passes.token(arguments.prompt), device=device)
        return seconds(lambda: model.forward(ids, arguments.prompt), passes.WARM_UP + arguments.passes, device)

    def prompt(tokens):
        model = Llama(arguments.layers, 1, tokens, device)
        ids = torch.tensor([[passes.token(at) for at in range(tokens)]], device=device)
        return seconds(lambda: model.forward(ids, 0), 1, device)[0]

    if dist.get_rank() != 0:
        sys.stdout = open(os.devnull, "w")
        arguments.json = None
    with torch.inference_mode():
        passes.run(arguments, decode, prompt)
    dist.destroy_process_group()


main()
