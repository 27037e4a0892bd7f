"""llama.cpp on CPUs through its Python wheel, by the method of `decode_rate`.

    python benches/peers/llamacpp.py GGUF [--threads 2] [--sequences 1,2,4,8,16] [--prompt 512] [--passes 20]
        [--prefill 128,512] [--json FILE]
    python benches/peers/llamacpp.py --convert MODEL GGUF

Output as hugging_face.py. `--convert` writes a Llama checkpoint of Hugging Face, its types kept, as GGUF with a vocabulary of
numbered tokens: enough for passes, not for text.
"""
import argparse, json, statistics, sys, time
import numpy as np

WARM_UP, PROMPTS, STEP, VOCABULARY = 4, 5, 37, 32000


def convert(folder, path):
    import gguf, safetensors.torch, torch
    from pathlib import Path

    folder = Path(folder)
    config = json.loads((folder / "config.json").read_text())
    heads, layers = config["num_attention_heads"], config["num_hidden_layers"]
    kv_heads = config.get("num_key_value_heads") or heads
    out = gguf.GGUFWriter(path, "llama")
    out.add_context_length(config["max_position_embeddings"])
    out.add_embedding_length(config["hidden_size"])
    out.add_block_count(layers)
    out.add_feed_forward_length(config["intermediate_size"])
    out.add_head_count(heads)
    out.add_head_count_kv(kv_heads)
    out.add_layer_norm_rms_eps(config["rms_norm_eps"])
    theta = config.get("rope_theta") or (config.get("rope_parameters") or {}).get("rope_theta", 10000.0)
    out.add_rope_freq_base(theta)
    out.add_rope_dimension_count(config["hidden_size"] // heads)
    out.add_vocab_size(config["vocab_size"])
    out.add_tokenizer_model("llama")
    out.add_token_list([f"t{at}" for at in range(config["vocab_size"])])
    out.add_token_scores([0.0] * config["vocab_size"])
    out.add_token_types([gguf.TokenType.NORMAL] * config["vocab_size"])
    names = gguf.TensorNameMap(gguf.MODEL_ARCH.LLAMA, layers)
    for file in sorted(folder.glob("*.safetensors")):
        for name, tensor in safetensors.torch.load_file(file).items():
            for suffix, count in (("q_proj.weight", heads), ("k_proj.weight", kv_heads)):
                if name.endswith(suffix):  # GGUF has the rotated pairs next to each other.
                    rows, columns = tensor.shape
                    tensor = tensor.reshape(count, 2, rows // count // 2, columns).swapaxes(1, 2).reshape(rows, columns)
            new = names.get_name(name, try_suffixes=(".weight",))
            if tensor.dtype == torch.bfloat16 and tensor.dim() > 1:
                raw = tensor.contiguous().view(torch.uint8).numpy()
                out.add_tensor(new, raw, raw_shape=raw.shape, raw_dtype=gguf.GGMLQuantizationType.BF16)
            else:
                out.add_tensor(new, tensor.float().numpy())
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


def main():
    numbers = lambda text: [int(n) for n in text.split(",") if n]
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("gguf")
    flags.add_argument("--convert", metavar="MODEL")
    flags.add_argument("--threads", type=int, default=2)
    flags.add_argument("--sequences", type=numbers, default=[1, 2, 4, 8, 16])
    flags.add_argument("--prompt", type=int, default=512)
    flags.add_argument("--passes", type=int, default=20)
    flags.add_argument("--prefill", type=numbers, default=[])
    flags.add_argument("--json")
    flags = flags.parse_args()
    if flags.convert:
        return convert(flags.convert, flags.gguf)
    import llama_cpp as ll

    ll.llama_backend_init()
    silent = ll.llama_log_callback(lambda *_: None)
    ll.llama_log_set(silent, None)
    model = ll.llama_model_load_from_file(flags.gguf.encode(), ll.llama_model_default_params())
    token = lambda at: at * STEP % VOCABULARY
    results = []

    def context(sequences, length):
        params = ll.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = sequences * (-(-length // 256) * 256), 2048, 512
        params.n_seq_max, params.n_threads, params.n_threads_batch = sequences, flags.threads, flags.threads
        params.no_perf = True
        return ll.llama_init_from_model(model, params)

    def forward(ctx, items):
        """items: (token, position, sequence, whether it needs logits)."""
        batch = ll.llama_batch_init(len(items), 0, 1)
        batch.n_tokens = len(items)
        for at, (tok, position, sequence, logits) in enumerate(items):
            batch.token[at], batch.pos[at], batch.n_seq_id[at] = tok, position, 1
            batch.seq_id[at][0], batch.logits[at] = sequence, logits
        started = time.perf_counter()
        if ll.llama_decode(ctx, batch):
            sys.exit("llama_decode failed")
        first = ll.llama_get_logits_ith(ctx, len(items) - 1)[0]
        took = time.perf_counter() - started
        assert np.isfinite(first)
        ll.llama_batch_free(batch)
        return took

    for n in flags.sequences:
        ctx, times = context(n, flags.prompt + WARM_UP + flags.passes), []
        for sequence in range(n):
            forward(ctx, [(token(at), at, sequence, at + 1 == flags.prompt) for at in range(flags.prompt)])
        for at in range(flags.prompt, flags.prompt + WARM_UP + flags.passes):
            times.append(forward(ctx, [(token(at), at, sequence, True) for sequence in range(n)]))
        results.append({"sequences": n, "prompt": flags.prompt, "us": statistics.median(times[WARM_UP:]) * 1e6})
        print(json.dumps(results[-1]), flush=True)
        ll.llama_free(ctx)
    for tokens in flags.prefill:
        times = []
        for _ in range(1 + PROMPTS):
            ctx = context(1, tokens)
            times.append(forward(ctx, [(token(at), at, 0, at + 1 == tokens) for at in range(tokens)]))
            ll.llama_free(ctx)
        results.append({"prefill": tokens, "us": statistics.median(times[1:]) * 1e6})
        print(json.dumps(results[-1]), flush=True)
    if flags.json:
        with open(flags.json, "w") as file:
            json.dump(results, file)


main()
