"""Prompts and passes of a Llama model on CPUs: ours, transformers' and llama.cpp's, a second or so each in turn.

python in_turn.py DECODE_RATE MODEL [--gguf FILE] [--dtype bf16] [--what prompt=128,sequences=1] [--ranks 1,2] [--threads 2]
    [--rounds 8] [--prompt 64] [--before DECODE_RATE] [--json FILE]

All programs are loaded, and stopped (SIGSTOP) while another one works. Passes follow a prompt of --prompt tokens for each sequence.
--before adds another build of ours, and --gguf llama.cpp with the model in that file. Prints the median and the least time in
milliseconds, how many processors the program kept busy, and the ratio to transformers' time in the same round: its median, and the
least and greatest.
"""
import argparse
import json
import os
import pathlib
import queue
import signal
import statistics
import subprocess
import sys
import threading
import time

HERE = pathlib.Path(__file__).parent
PEER = "transformers"


class Program:
    """A program that repeats the same work, and works only in its turns."""

    def __init__(self, command):
        self.command = command
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        self.lines = queue.Queue()
        threading.Thread(target=self.read, daemon=True).start()
        self.all = []
        try:
            self.next()
            self.all = descendants(self.process.pid)
            self.signal(signal.SIGSTOP)
        except BaseException:
            self.end()
            raise

    def read(self):
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put(None)

    def signal(self, what):
        for process in self.all or descendants(self.process.pid):
            try:
                os.kill(process, what)
            except ProcessLookupError:
                pass

    def end(self):
        self.signal(signal.SIGKILL)
        self.process.wait()

    def next(self):
        """The next time in milliseconds that it prints, behind whatever its launcher writes before it."""
        while (line := self.lines.get()) is not None:
            if line.split()[-1:] and line.split()[-1].isdecimal():
                return int(line.split()[-1]) / 1000
        raise SystemExit(f"{' '.join(self.command)}: ended with exit code {self.process.wait()}")

    def turn(self):
        # What it printed while it was being stopped.
        while not self.lines.empty():
            if self.lines.get() is None:
                self.lines.put(None)
                break
        self.signal(signal.SIGCONT)
        # This one began in the turn before.
        self.next()
        began, ran = time.perf_counter(), self.ran()
        took = self.next()
        busy = (self.ran() - ran) / (time.perf_counter() - began)
        self.signal(signal.SIGSTOP)
        return took, busy

    def ran(self):
        """For how many seconds its threads have had a processor, all together."""
        nanoseconds = 0
        for process in self.all:
            for thread in pathlib.Path(f"/proc/{process}/task").glob("*/schedstat"):
                try:
                    nanoseconds += int(thread.read_text().split()[0])
                except OSError:
                    pass
        return nanoseconds / 1e9


def descendants(pid):
    children = {}
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            text = stat.read_text()
        except OSError:
            continue
        children.setdefault(int(text[text.rindex(")") + 2:].split()[1]), []).append(int(stat.parent.name))
    found, open_ = [], [pid]
    while open_:
        found.append(open_.pop())
        open_ += children.get(found[-1], [])
    return found


def main():
    numbers = lambda text: [int(n) for n in text.split(",")]
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("decode_rate")
    flags.add_argument("model")
    flags.add_argument("--gguf")
    flags.add_argument("--dtype", default="bf16")
    flags.add_argument("--what", type=lambda text: text.split(","), default=["prompt=128", "sequences=1"])
    flags.add_argument("--ranks", type=numbers, default=[1, 2])
    flags.add_argument("--threads", type=int, default=2)
    flags.add_argument("--rounds", type=int, default=8)
    flags.add_argument("--prompt", default="64")
    flags.add_argument("--before")
    flags.add_argument("--json")
    flags = flags.parse_args()
    # What ends this program, such as `timeout`, must end the others too: stopped, they would stay.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("in_turn.py: ended by SIGTERM"))
    ours = {"": flags.decode_rate} | ({"before, ": flags.before} if flags.before else {})
    systems = {
        f"{name}{ranks} rank{'s' * (ranks > 1)}": [build, "--backend", "tcp", "--world-size", str(ranks), "--model", flags.model,
                                                  "--dtype", flags.dtype, "--sequences", "1"]
        for name, build in ours.items() for ranks in flags.ranks
    }
    peer_flags = ["--threads", str(flags.threads), "--sequences", ""]
    systems[PEER] = [sys.executable, str(HERE / "hugging_face.py"), flags.model, "--dtype", flags.dtype, *peer_flags]
    if flags.gguf:
        systems["llama.cpp"] = [sys.executable, str(HERE / "llamacpp.py"), flags.gguf, *peer_flags]
    results = []
    for what in flags.what:
        programs, times = {}, {name: [] for name in systems}
        try:
            for name, command in systems.items():
                programs[name] = Program([*command, "--prompt", flags.prompt, "--passes", "8", "--follow", what])
            for _ in range(flags.rounds):
                for name, program in programs.items():
                    times[name].append(program.turn())
        finally:
            for program in programs.values():
                program.end()
        for name, turns in times.items():
            took, busy = zip(*turns)
            ratios = [ours / peer for ours, (peer, _) in zip(took, times[PEER])]
            row = {"what": what, "system": name, "median_ms": statistics.median(took), "least_ms": min(took),
                   "busy": statistics.median(busy), "ratio": statistics.median(ratios), "least_ratio": min(ratios),
                   "greatest_ratio": max(ratios)}
            results.append(row)
            print(f"{what:<14}{name:<18}{row['median_ms']:>9.1f} ms, least {row['least_ms']:>8.1f}   {row['busy']:.2f} busy   "
                  f"ratio {row['ratio']:.2f} ({row['least_ratio']:.2f} to {row['greatest_ratio']:.2f})", flush=True)
    if flags.json:
        pathlib.Path(flags.json).write_text(json.dumps(results))


main()
