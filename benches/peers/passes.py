"""The work of `decode_rate`, which hugging_face.py and llamacpp.py do too: its flags, its tokens, and its results."""
import argparse
import json
import statistics

WARM_UP, PROMPTS, STEP, VOCABULARY = 4, 5, 37, 32000


def token(at):
    return at * STEP % VOCABULARY


def flags(doc):
    def numbers(text):
        return [int(n) for n in text.split(",") if n]

    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--sequences", type=numbers, default=[1, 2, 4, 8, 16])
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--passes", type=int, default=20)
    parser.add_argument("--prefill", type=numbers, default=[])
    parser.add_argument("--json")
    parser.add_argument("--follow", metavar="prompt=TOKENS|sequences=N")
    return parser


def run(arguments, passes, prompt):
    """Prints a line of JSON for each number of sequences and each prompt, and writes all to --json. `passes(n)` gives the seconds of
    WARM_UP + --passes passes of `n` sequences, `prompt(tokens)` those of one prompt. With --follow it then repeats one prompt, or
    the passes of N sequences, until it is killed. It prints the microseconds of each."""
    results = []

    def add(**row):
        results.append(row)
        print(json.dumps(row), flush=True)

    def one_pass(n):
        return statistics.median(passes(n)[WARM_UP:])

    for n in arguments.sequences:
        add(sequences=n, prompt=arguments.prompt, us=one_pass(n) * 1e6)
    for tokens in arguments.prefill:
        # The first one warms up.
        times = [prompt(tokens) for _ in range(1 + PROMPTS)]
        add(prefill=tokens, us=statistics.median(times[1:]) * 1e6)
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(results, file)
    while arguments.follow:
        what, n = arguments.follow.split("=")
        took = {"prompt": prompt, "sequences": one_pass}[what](int(n))
        print(f"{took * 1e6:.0f}", flush=True)
