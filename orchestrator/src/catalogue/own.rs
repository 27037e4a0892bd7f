//! Errors of settings, programs, models and the rendezvous.

use ryzanstein_process_group::catalogue::Source::Provoked;
use ryzanstein_process_group::catalogue::{Entry, Section};

pub(super) const SECTIONS: &[Section] = &[
    Section { title: "Settings", entries: SETTINGS },
    Section { title: "Programs", entries: PROGRAMS },
    Section { title: "Models", entries: MODELS },
    Section { title: "Rendezvous", entries: RENDEZVOUS },
    Section { title: "Backends", entries: BACKENDS },
];

const SETTINGS: &[Entry] = &[
    Entry {
        id: "unknown-setting",
        patterns: &["unknown setting:"],
        sample: "error: unknown setting: environment variable `RYZ_PROCESS_GROUP__TIMEUOT`; did you mean \
                 `RYZ_PROCESS_GROUP__TIMEOUT`?",
        source: Provoked,
        cause: "no setting has this name; every variable that begins with `RYZ_` is checked",
        remedy: "correct the name, or unset the variable; `ryz config show` lists all settings",
        is_plain: true,
    },
    Entry {
        id: "bad-value",
        patterns: &["`*` (*): expected *, such as `"],
        sample: "error: `process_group.timeout` (environment variable RYZ_PROCESS_GROUP__TIMEOUT): expected a duration with its \
                 unit (ns, us, ms, s, m, h, d), more than zero and at most 365d, such as `30s`, not `30` (the unit is missing: \
                 write `30s` for seconds or `30ms` for milliseconds)",
        source: Provoked,
        cause: "the setting takes no such value; durations need a unit, because a bare number could be seconds or milliseconds \
                (only `ryz launch --timeout 30` accepts it, as seconds)",
        remedy: "write a value as the message shows; `ryz config show` tells where each value comes from",
        is_plain: true,
    },
    Entry {
        id: "no-settings-file",
        patterns: &["cannot read the configuration file"],
        sample: "error: cannot read the configuration file none.toml: No such file or directory (os error 2)",
        source: Provoked,
        cause: "`--config` or `RYZ_CONFIG` names a file that does not exist or is not one of settings; only the default file, \
                `ryzanstein.toml`, may be missing",
        remedy: "correct the path, or unset `RYZ_CONFIG`",
        is_plain: false,
    },
];

const PROGRAMS: &[Entry] = &[
    Entry {
        id: "secret-not-handed-down",
        patterns: &["was not handed down to this process"],
        sample: "error: configuration: descriptor 9, which holds the job's secret, was not handed down to this process (No such \
                 file or directory (os error 2)); the program that started it must leave descriptors open (in Python: \
                 close_fds=False)",
        source: Provoked,
        cause: "the program after `--` starts the actual rank as its child and closes inherited descriptors",
        remedy: "leave them open, or `exec` the rank",
        is_plain: true,
    },
    Entry {
        id: "killed",
        patterns: &["it was killed by signal 9", "first failure: rank * was killed by signal 9"],
        sample: "  cause: it was killed by signal 9 (SIGKILL) and wrote nothing to stderr",
        source: Provoked,
        cause: "something outside the job killed the rank: most often the kernel or the container, because memory ran out, or the \
                cluster's scheduler at a limit",
        remedy: "look for the out-of-memory killer with `dmesg`, and for the reason in the scheduler's or the container's events",
        is_plain: false,
    },
    Entry {
        id: "bus-error",
        patterns: &["it was killed by signal 7", "first failure: rank * was killed by signal 7", "bus error"],
        sample: "  cause: it was killed by signal 7 (SIGBUS) and wrote nothing to stderr",
        source: Provoked,
        cause: "the rank used memory that is mapped and cannot be had: /dev/shm is full, or a mapped file was cut short while in \
                use",
        remedy: "see `df -h /dev/shm`; give a container more with --shm-size=8g; do not change a model's files while ranks use them",
        is_plain: false,
    },
    Entry {
        id: "crashed",
        patterns: &[
            "it was killed by signal 11",
            "first failure: rank * was killed by signal 11",
            "segmentation fault",
        ],
        sample: "  cause: it was killed by signal 11 (SIGSEGV) and wrote nothing to stderr",
        source: Provoked,
        cause: "native code of the rank crashed: the program, a library, or one of another version than the program was built for",
        remedy: "allow core dumps with `ulimit -c unlimited` and read one with gdb or `coredumpctl gdb`",
        is_plain: false,
    },
    Entry {
        id: "not-killed",
        patterns: &["could not be killed: pid"],
        sample: "  could not be killed: pid 4711 (python3, state D)",
        source: Provoked,
        cause: "the process is in an uninterruptible wait, for instance for a dead network file system or a driver",
        remedy: "repair what it waits for, or restart the host; the launcher does not wait for it",
        is_plain: false,
    },
    Entry {
        id: "log-incomplete",
        patterns: &["is not logged any more"],
        sample: "cannot write logs/rank-1/stdout.log: No space left on device (os error 28); the output of rank 1 is not \
                 logged any more",
        source: Provoked,
        cause: "the disk of `--log-dir` is full, or failed; the job goes on, and its output is still forwarded",
        remedy: "free space before the next job",
        is_plain: false,
    },
];

const MODELS: &[Entry] = &[
    Entry {
        id: "model-does-not-fit-settings",
        patterns: &["is config.json that of these weights?", "it is in none of the weight files"],
        sample: "error: models/x/model.safetensors: tensor `model.embed_tokens.weight`: expected shape [100, 64], found [100, \
                 48]; is config.json that of these weights?",
        source: Provoked,
        cause: "`config.json` and the weights belong to different models",
        remedy: "get both from the same source",
        is_plain: false,
    },
    Entry {
        id: "model-has-more",
        patterns: &["the checkpoint has tensors that this model does not use"],
        sample: "WARN the checkpoint has tensors that this model does not use",
        source: Provoked,
        cause: "`config.json` describes a smaller model than the weights, or the weights have parts that are not computed here: \
                biases without `attention_bias`, adapters, vision towers; results are wrong where the model should have used them",
        remedy: "compare `config.json` with the source's",
        is_plain: false,
    },
];

const RENDEZVOUS: &[Entry] = &[
    Entry {
        id: "rendezvous-port-taken",
        patterns: &["the port is taken by another process"],
        sample: "error: cannot serve the rendezvous at 127.0.0.1:29777: the port is taken by another process, which `ss -ltnp \
                 'sport = :29777'` names; end that process, or give another port with --rendezvous",
        source: Provoked,
        cause: "another process listens at the address of `--rendezvous`, perhaps an earlier job",
        remedy: "end it, or give another port; on one node, omit `--rendezvous`: the launcher then takes any free port, without a \
                 race",
        is_plain: true,
    },
    Entry {
        id: "wrong-secret",
        patterns: &["does not know this job's secret", "instead of proving that it knows this job's secret"],
        sample: "error: rendezvous: cannot reach the rendezvous at 127.0.0.1:29801: the other end does not know this job's \
                 secret, so it belongs to another job",
        source: Provoked,
        cause: "the secrets differ: the file differs between nodes, or another job has the port, whose own ranks then time out",
        remedy: "use the same file on every node (compare `sha256sum`), or another port",
        is_plain: false,
    },
    Entry {
        id: "wrong-version",
        patterns: &["the server there is not a rendezvous of this version"],
        sample: "error: rendezvous: cannot reach the rendezvous at node0:29500: the server there is not a rendezvous of this \
                 version",
        source: Provoked,
        cause: "another service has this port, or the nodes have different versions of this program",
        remedy: "compare `ryz --version` on all nodes, and see who has the port with `ss -ltnp`",
        is_plain: false,
    },
    Entry {
        id: "rendezvous-silent",
        patterns: &["it accepted the connection but said nothing"],
        sample: "error: rendezvous: cannot reach the rendezvous at 127.0.0.1:29500: it accepted the connection but said nothing \
                 for 1.0s; another kind of service may have this port",
        source: Provoked,
        cause: "another kind of service has this port, or the rendezvous is stopped",
        remedy: "see who has the port with `ss -ltnp`, and give another one with --rendezvous or MASTER_PORT",
        is_plain: false,
    },
    Entry {
        id: "rendezvous-unreachable",
        patterns: &["cannot reach the rendezvous at"],
        sample: "error: rendezvous: cannot reach the rendezvous at node0:29500: Connection refused (os error 111), tried for \
                 60.0s; check that the launcher (or rank 0) runs there, that the address is right, and that no firewall blocks it",
        source: Provoked,
        cause: "no rendezvous runs there, or packets do not arrive; ranks retry until rendezvous.timeout",
        remedy: "run `ss -ltn` on the first node, and `nc -vz node0 29500` on the other",
        is_plain: false,
    },
    Entry {
        id: "secret-needed",
        patterns: &["which is not a loopback address, needs a secret"],
        sample: "error: configuration: a rendezvous at 192.0.2.2:29801, which is not a loopback address, needs a secret; set \
                 RYZ_SECRET_FILE, for every rank, to a file with mode 0600 that holds the same 32 random bytes",
        source: Provoked,
        cause: "another launcher started the ranks, and the address is not a loopback one",
        remedy: "make a secret once with `head -c 32 /dev/urandom`, copy it to every node, and name it in RYZ_SECRET_FILE",
        is_plain: true,
    },
    Entry {
        id: "secret-not-left",
        patterns: &["has not left the job's secret yet"],
        sample: "error: rendezvous: rank 0 has not left the job's secret yet: cannot open the secret's file \
                 /tmp/ryzanstein-0-29801.secret: No such file or directory (os error 2)",
        source: Provoked,
        cause: "the ranks meet at a loopback address under another launcher, and rank 0 did not start, runs as another user, or \
                has another TMPDIR or XDG_RUNTIME_DIR",
        remedy: "find out why rank 0 did not start; you need not create the file",
        is_plain: false,
    },
    Entry {
        id: "join-timed-out",
        patterns: &["joining epoch * timed out"],
        sample: "error: joining epoch 1 timed out after 60.0s: rank 2 is not there",
        source: Provoked,
        cause: "that rank never joined: it waits for something else, hangs in a file system, or its node was not started",
        remedy: "look at that rank's output; if start-up is slow (imports, compilation), raise rendezvous.timeout",
        is_plain: false,
    },
    Entry {
        id: "ended-without-joining",
        patterns: &["exited with code * without joining"],
        sample: "error: rendezvous: rank 2 exited with code 0 without joining",
        source: Provoked,
        cause: "that rank's program ended without calling the library; the others fail at once instead of at their timeout",
        remedy: "let every rank join, or none",
        is_plain: false,
    },
    Entry {
        id: "ranks-unreachable",
        patterns: &["connecting group * timed out"],
        sample: "error: connecting group `world` timed out after 60.0s: ranks 2 and 3 are not there",
        source: Provoked,
        cause: "ranks announced an address that the others cannot reach: `127.0.1.1`, because `/etc/hosts` maps the host's own \
                name to it (the default on Debian), or a firewall blocks the network between them",
        remedy: "give --rendezvous an address instead of a name; or set process_group.tcp.interface, or process_group.tcp.bind",
        is_plain: false,
    },
];

const BACKENDS: &[Entry] = &[Entry {
    id: "backend-not-usable",
    patterns: &["no rank can use it:"],
    sample: "error: configuration: not `nccl`: no rank can use it: the CUDA driver (12.0.0 or newer) was not found: \
                 libcuda.so.1 by the loader: not there. Install it, or set device.cuda to its path",
    source: Provoked,
    cause: "the requested backend is not available, and there is no silent fallback; as the reason that `ryz check` prints \
                first, the same text is no error",
    remedy: "install the library, or set device.cuda or device.nccl; without a GPU, use `tcp` or `auto`",
    is_plain: true,
}];
