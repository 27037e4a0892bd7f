"""llama.cpp on CPUs through its Python wheel, by the method of `decode_rate`.

    python benches/peers/llamacpp.py GGUF [--threads 2] [--sequences 1,2,4,8,16] [--prompt 512] [--passes 20]
        [--prefill 128,512] [--json FILE] [--follow prompt=TOKENS|sequences=N]
    python benches/peers/llamacpp.py --convert MODEL GGUF

Output as hugging_face.py. `--convert` writes a Llama checkpoint of Hugging Face, its types kept, as GGUF with a vocabulary of
numbered tokens: enough for passes, not for text.
"""
import json
import sys
import time

import numpy as np

import passes


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


def measure(arguments):
    import llama_cpp as ll

    ll.llama_backend_init()
    silent = ll.llama_log_callback(lambda *_: None)
    ll.llama_log_set(silent, None)
    model = ll.llama_model_load_from_file(arguments.gguf.encode(), ll.llama_model_default_params())

    def context(sequences, length):
        params = ll.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = sequences * (-(-length // 256) * 256), 2048, 512
        params.n_seq_max, params.n_threads, params.n_threads_batch = sequences, arguments.threads, arguments.threads
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

    def text(tokens, sequence):
        return [(passes.token(at), at, sequence, at + 1 == tokens) for at in range(tokens)]

    def decode(n):
        end = arguments.prompt + passes.WARM_UP + arguments.passes
        ctx = context(n, end)
        for sequence in range(n):
            forward(ctx, text(arguments.prompt, sequence))
        steps = range(arguments.prompt, end)
        times = [forward(ctx, [(passes.token(at), at, sequence, True) for sequence in range(n)]) for at in steps]
        ll.llama_free(ctx)
        return times

    def prompt(tokens):
        ctx = context(1, tokens)
        took = forward(ctx, text(tokens, 0))
        ll.llama_free(ctx)
        return took

    passes.run(arguments, decode, prompt)


def main():
    parser = passes.flags(__doc__)
    parser.add_argument("gguf")
    parser.add_argument("--convert", metavar="MODEL")
    arguments = parser.parse_args()
    if arguments.convert:
        convert(arguments.convert, arguments.gguf)
    else:
        measure(arguments)


main()
