"""Hugging Face transformers on CPUs, by the method of `decode_rate`: what our layers are compared with.

    python benches/peers/hugging_face.py MODEL [--dtype bf16] [--threads 2] [--sequences 1,2,4,8,16] [--prompt 512] [--passes 20]
        [--prefill 128,512] [--json FILE]

One line of JSON for each number of sequences: microseconds of a pass that gives each a token, and one for each prompt: until it
has the logits of its last token. Medians.
"""
import argparse, json, statistics, time
import torch, transformers

WARM_UP, PROMPTS, STEP, VOCABULARY = 4, 5, 37, 32000
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


def main():
    numbers = lambda text: [int(n) for n in text.split(",") if n]
    flags = argparse.ArgumentParser()
    flags.add_argument("model")
    flags.add_argument("--dtype", default="bf16", choices=DTYPES)
    flags.add_argument("--threads", type=int, default=2)
    flags.add_argument("--sequences", type=numbers, default=[1, 2, 4, 8, 16])
    flags.add_argument("--prompt", type=int, default=512)
    flags.add_argument("--passes", type=int, default=20)
    flags.add_argument("--prefill", type=numbers, default=[])
    flags.add_argument("--json")
    flags = flags.parse_args()
    torch.set_num_threads(flags.threads)
    model = transformers.AutoModelForCausalLM.from_pretrained(flags.model, dtype=DTYPES[flags.dtype]).eval()
    token = lambda at: at * STEP % VOCABULARY
    results = []

    def forward(ids, cache):
        started = time.perf_counter()
        out = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return out, time.perf_counter() - started

    with torch.inference_mode():
        for n in flags.sequences:
            text = torch.tensor([[token(at) for at in range(flags.prompt)]])
            cache, times = transformers.DynamicCache(), []
            cache = forward(text.expand(n, -1), cache)[0].past_key_values
            for at in range(WARM_UP + flags.passes):
                out, took = forward(torch.full((n, 1), token(flags.prompt + at)), cache)
                cache = out.past_key_values
                times.append(took)
            results.append({"sequences": n, "prompt": flags.prompt, "us": statistics.median(times[WARM_UP:]) * 1e6})
            print(json.dumps(results[-1]), flush=True)
        for tokens in flags.prefill:
            text = torch.tensor([[token(at) for at in range(tokens)]])
            times = [forward(text, transformers.DynamicCache())[1] for _ in range(1 + PROMPTS)]
            results.append({"prefill": tokens, "us": statistics.median(times[1:]) * 1e6})
            print(json.dumps(results[-1]), flush=True)
    if flags.json:
        with open(flags.json, "w") as file:
            json.dump(results, file)


main()
