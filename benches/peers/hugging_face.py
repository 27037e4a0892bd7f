"""Hugging Face transformers on CPUs, by the method of `decode_rate`: what our layers are compared with.

    python benches/peers/hugging_face.py MODEL [--dtype bf16] [--threads 2] [--sequences 1,2,4,8,16] [--prompt 512] [--passes 20]
        [--prefill 128,512] [--json FILE] [--follow prompt=TOKENS|sequences=N]

One line of JSON for each number of sequences: microseconds of a pass that gives each a token, and one for each prompt: until it
has the logits of its last token. Medians.
"""
import time

import torch
import transformers

import passes

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


def main():
    parser = passes.flags(__doc__)
    parser.add_argument("model")
    parser.add_argument("--dtype", default="bf16", choices=DTYPES)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    model = transformers.AutoModelForCausalLM.from_pretrained(arguments.model, dtype=DTYPES[arguments.dtype]).eval()

    def forward(ids, cache):
        started = time.perf_counter()
        out = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return out.past_key_values, time.perf_counter() - started

    def text(tokens):
        return torch.tensor([[passes.token(at) for at in range(tokens)]])

    def decode(n):
        cache, times = forward(text(arguments.prompt).expand(n, -1), transformers.DynamicCache())[0], []
        for at in range(passes.WARM_UP + arguments.passes):
            cache, took = forward(torch.full((n, 1), passes.token(arguments.prompt + at)), cache)
            times.append(took)
        return times

    with torch.inference_mode():
        passes.run(arguments, decode, lambda tokens: forward(text(tokens), transformers.DynamicCache())[1])


main()
