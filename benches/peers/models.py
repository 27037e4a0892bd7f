"""Llama models on CPUs: ours next to Hugging Face's transformers and llama.cpp, in turn.

python models.py DECODE_RATE MODEL [--gguf FILE] [--dtype bf16] [--ranks 1,2] [--threads 2] [--rounds 3] [--sequences 1,2,4,8,16]
    [--prompt 64] [--passes 12] [--prefill 128,512] [--json FILE]

Runs `decode_rate` with each number of ranks, hugging_face.py, and llamacpp.py if --gguf is given, one after the other, --rounds times.
All use the same cores: --threads divided by the ranks for ours. Prints medians over the rounds, in milliseconds: of a pass that
gives each sequence a token, and of a prompt.
"""
import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).parent


def main():
    numbers = lambda text: [int(n) for n in text.split(",") if n]
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("decode_rate")
    flags.add_argument("model")
    flags.add_argument("--gguf")
    flags.add_argument("--dtype", default="bf16")
    flags.add_argument("--ranks", type=numbers, default=[1, 2])
    flags.add_argument("--threads", type=int, default=2)
    flags.add_argument("--rounds", type=int, default=3)
    flags.add_argument("--sequences", default="1,2,4,8,16")
    flags.add_argument("--prompt", default="64")
    flags.add_argument("--passes", default="12")
    flags.add_argument("--prefill", default="128,512")
    flags.add_argument("--json")
    flags = flags.parse_args()
    work = ["--sequences", flags.sequences, "--prompt", flags.prompt, "--passes", flags.passes, "--prefill", flags.prefill]
    peers = ["--threads", str(flags.threads)]
    systems = {
        f"ours, {ranks} rank{'s' * (ranks > 1)}": [flags.decode_rate, "--backend", "tcp", "--world-size", str(ranks),
                                                   "--model", flags.model, "--dtype", flags.dtype]
        for ranks in flags.ranks
    }
    systems["transformers"] = [sys.executable, str(HERE / "hugging_face.py"), flags.model, "--dtype", flags.dtype, *peers]
    if flags.gguf:
        systems["llama.cpp"] = [sys.executable, str(HERE / "llamacpp.py"), flags.gguf, *peers]
    found = {}
    for _ in range(flags.rounds):
        for name, command in systems.items():
            with tempfile.NamedTemporaryFile() as file:
                command = [*command, *work, "--json", file.name]
                done = subprocess.run(command, capture_output=True, text=True)
                if done.returncode != 0:
                    sys.exit(f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
                for row in json.load(open(file.name)):
                    what = f"{row['sequences']} sequences" if row.get("sequences") else f"prompt of {row['prefill']}"
                    found.setdefault(what, {}).setdefault(name, []).append(row["us"] / 1000)
    print(" " * 16 + "".join(f"{name:>16}" for name in systems))
    results = []
    for what, by_system in found.items():
        medians = [statistics.median(by_system[name]) for name in systems]
        print(f"{what:<16}" + "".join(f"{value:>16.1f}" for value in medians))
        results.append({"what": what, **dict(zip(systems, medians))})
    if flags.json:
        pathlib.Path(flags.json).write_text(json.dumps(results))


main()
