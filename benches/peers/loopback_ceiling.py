"""What loopback TCP itself carries: the most any TCP backend on this host can move. Needs only the standard library.

python loopback_ceiling.py [SECONDS]    # a JSON line for one stream and one for two, SECONDS (0.5) per block size

A stream is a sending and a receiving process that do nothing else. Blocking sockets, one block per system call, no
socket option but TCP_NODELAY; `gbit_s` is the best block size's, `by_block` has all of them (the better of two runs).
Two streams are four processes: on fewer cores they share them and carry less than twice one stream.
"""
import json
import multiprocessing as mp
import os
import socket
import sys
import time

BLOCKS = [1 << k for k in range(15, 23)]


def send(port, block, seconds, start):
    s = socket.create_connection(("127.0.0.1", port))
    s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    data = memoryview(bytes(os.urandom(4096)) * (block // 4096))
    start.wait()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        s.sendall(data)
    s.close()


def receive(listener, block, start, results):
    s, _ = listener.accept()
    buffer = bytearray(block)
    start.wait()
    begin, count = time.monotonic(), 0
    while n := s.recv_into(buffer):
        count += n
    results.put((begin, time.monotonic(), count))


def gbit_s(streams, block, seconds):
    start, results, processes = mp.Barrier(2 * streams), mp.Queue(), []
    for _ in range(streams):
        listener = socket.create_server(("127.0.0.1", 0))
        processes.append(mp.Process(target=receive, args=(listener, block, start, results)))
        processes.append(mp.Process(target=send, args=(listener.getsockname()[1], block, seconds, start)))
    for p in processes:
        p.start()
    got = [results.get(timeout=seconds + 30) for _ in range(streams)]
    for p in processes:
        p.join()
    # The monotonic clock is one for all processes of a host.
    return sum(c for _, _, c in got) * 8e-9 / (max(e for _, e, _ in got) - min(b for b, _, _ in got))


if __name__ == "__main__":
    mp.set_start_method("fork")
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 0.5
    for streams in (1, 2):
        by_block = {block: round(max(gbit_s(streams, block, seconds) for _ in range(2)), 2) for block in BLOCKS}
        best = max(by_block, key=by_block.get)
        print(json.dumps({"streams": streams, "gbit_s": by_block[best], "gbyte_s": round(by_block[best] / 8, 3),
                          "block_bytes": best, "cores": os.cpu_count(), "by_block": by_block}), flush=True)
