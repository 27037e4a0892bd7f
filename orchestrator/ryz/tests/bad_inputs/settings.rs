//! Flags, variables and the settings' file.

use crate::support::{Case, Content};

/// Flags that are no flags, or have no such value.
pub(crate) fn flags() -> Vec<Case> {
    vec![
        Case::new("", &["Usage: ryz", "Commands:"]),
        Case::new("lanch", &["unrecognized subcommand 'lanch'", "similar", "'launch'"]),
        Case::new("--nonsense", &["unexpected argument '--nonsense'", "--help"]),
        Case::new("launch --nonsense", &["unexpected argument '--nonsense'", "--help"]),
        Case::new("launch true", &["world size is not set", "--world-size N"]),
        Case::new("launch -n 2 train.py", &["`train.py` is not on the PATH", "python3 train.py"]),
        Case::new("launch", &["world size is not set", "--world-size N", "job.world_size"]),
        Case::new("launch --world-size", &["a value is required for '--world-size <N>'"]),
        Case::new("launch -n 0 -- true", &["--world-size", "from 1 to 65536", "not `0`"]),
        Case::new("launch -n -1 -- true", &["--world-size", "from 1 to 65536", "not `-1`"]),
        Case::new("launch -n=-1 -- true", &["--world-size", "from 1 to 65536", "not `-1`"]),
        Case::new("launch -n four -- true", &["--world-size", "a whole number", "not `four`"]),
        Case::new("launch -n", &["a value is required"]),
        Case::new("launch --world-size", &["world size is not set", "--world-size N"]).argument(""),
        Case::new("launch -n 2 -n 4 -- true", &["cannot be used multiple times"]),
        Case::new("launch -n 2 --nnodes 0 -- true", &["--nnodes", "from 1 to", "not `0`"]),
        Case::new(
            "launch -n 1 --nnodes 2 -- true",
            &["1 ranks cannot be spread over 2 nodes", "at least one"],
        ),
        Case::new("launch -n 2 --node-rank=-1 -- true", &["--node-rank", "a whole number", "not `-1`"]),
        Case::new("launch -n 2 --nnodes 2 --node-rank 2 -- true", &["launch.node_rank", "the last is 1"]),
        Case::new(
            "launch -n 2 --rendezvous nowhere -- true",
            &["--rendezvous", "HOST:PORT", "the port is missing"],
        ),
        Case::new("launch -n 2 --rdzv_endpoint nowhere -- true", &["--rendezvous", "the port is missing"]),
        Case::new("launch --nproc_per_node x -- true", &["--nproc-per-node", "a number of ranks, or gpu"]),
        Case::new("launch -n 2 --backend ncll -- true", &["--backend", "one of auto", "did you mean `nccl`"]),
        Case::new("launch -n 2 --max-restarts=-1 -- true", &["--max-restarts", "a whole number", "not `-1`"]),
        Case::new("launch -n 2 --timeout 0 -- true", &["--timeout", "more than zero", "not `0s`"]),
        Case::new("launch -n 2 --timeout=-3 -- true", &["--timeout", "a duration"]),
        Case::new("launch -n 2 --timeout nan -- true", &["--timeout", "a duration"]),
        Case::new("launch -n 2 --timeout 1e30 -- true", &["--timeout", "at most 365d"]),
        Case::new("launch -n 2 --timeout 3x -- true", &["--timeout", "a duration with its unit"]),
        Case::new("launch -n 2 --metrics-addr 9090 -- true", &["--metrics-addr", "an IP address and a port"]),
        Case::new("launch -n 2 --format yaml -- true", &["'yaml'", "possible values: table, json"]),
        Case::new("launch -n 2 --log-dir", &["a value is required for '--log-dir <D>'"]),
        Case::new("check --world-size 0", &["--world-size"]),
        Case::new("config", &["Usage: ryz config"]),
        Case::new("config shwo", &["unrecognized subcommand 'shwo'", "'show'"]),
    ]
}

/// Programs that cannot be launched.
pub(crate) fn programs() -> Vec<Case> {
    let launch = |program: &str, words: &[&str]| Case::new(&format!("launch -n 2 -- {program}"), words);
    vec![
        launch("no-such-program-anywhere", &["`no-such-program-anywhere` is not on the PATH"]),
        launch("./absent", &["`./absent` cannot be run", "No such file", "check the path"]),
        launch(
            "/no/such/folder/program",
            &["`/no/such/folder/program` cannot be run", "No such file", "check the path"],
        ),
        launch("{}", &["`{}` is a folder", "name a program in it"]),
        launch("./script", &["`./script` is not executable", "chmod +x ./script"])
            .file("script", "echo hello"),
        launch("my-script", &["`my-script` is not on the PATH", "check the spelling"])
            .file("my-script", "echo hello"),
        launch("./pipe", &["`./pipe` is not executable"]).file("pipe", Content::Pipe),
        launch("true", &["unknown setting", "RYZ_NONSENSE"]).variable("RYZ_NONSENSE", "1"),
        Case::new("launch -n 2 --", &["is not on the PATH"]).argument(""),
        Case::new(
            "launch -n 2 --log-dir {}/file -- true",
            &["--log-dir: cannot create {}/file/rank-0", "Not a directory"],
        )
        .file("file", "not a folder")
        .code(1),
    ]
}

/// Variables that are no settings, or have no such value. The tests of the settings have every kind of value.
pub(crate) fn variables() -> Vec<Case> {
    let mut cases = Vec::new();
    // Errors quote what was given: not all of it, and nothing that changes the terminal.
    for value in ["x".repeat(100_000), "\x1b]0;title\x07\x1b[31m1".into()] {
        let case = Case::new("config show", &["RYZ_JOB__WORLD_SIZE", "from 1 to 65536"]).without("\x1b");
        cases.push(case.variable("RYZ_JOB__WORLD_SIZE", &value).named("quoted"));
    }
    cases.extend([
        Case::new("config show", &["RYZ_PROCESS_GROUP__TIMEOUT", "a duration", "at most 365d", "such as `"])
            .variable("RYZ_PROCESS_GROUP__TIMEOUT", "10"),
        Case::new("config show", &["unknown setting", "RYZ_LOG__LEVLE", "did you mean", "RYZ_LOG__LEVEL"])
            .variable("RYZ_LOG__LEVLE", "1"),
        Case::new("config show", &["/no/such/file.toml", "No such file"])
            .variable("RYZ_CONFIG", "/no/such/file.toml"),
        Case::new("config show", &["RYZ_CONFIG or --config is empty"]).variable("RYZ_CONFIG", ""),
        Case::new("launch -n 1 -- true", &["RYZ_SECRET_FILE is empty"]).variable("RYZ_SECRET_FILE", ""),
    ]);
    cases
}

/// Settings' files that are none.
pub(crate) fn files() -> Vec<Case> {
    let toml = |text: &str, words: &[&str]| {
        let words: Vec<&str> = words.iter().copied().chain(["{}/a.toml"]).collect();
        Case::new("config show --config {}/a.toml", &words).named(text).file("a.toml", text)
    };
    let ill_formed = |text: &str, place: &str| {
        toml(text, &["not well-formed TOML", place, "a line is `[section]` or `key = value`"])
    };
    let mut cases = vec![
        ill_formed("[job]\nname = \n", "line 2, column 8"),
        ill_formed(&format!("a = {}", "[".repeat(100_000)), "line 1"),
        ill_formed(&"[a.".repeat(10_000), "line 1"),
        toml(
            "[job]\nwrold_size = 4\n",
            &["unknown setting: `job.wrold_size`", "did you mean `job.world_size`"],
        ),
        toml("[process_group]\ntimeout = 30\n", &["process_group.timeout", "the unit is missing", "`30s`"]),
        toml("[job]\nnmae = 'x'\n[log]\nformat = 'xml'\n", &["2 problems", "job.nmae", "log.format"]),
        toml("\"\\u001b[31mx\" = 1\n", &["unknown setting: `x`"]).without("\x1b"),
        Case::new("config show --config {}/a.toml", &["2000 problems", "more characters"])
            .named("many unknown settings")
            .file("a.toml", (0..2000).map(|number| format!("z{number} = 1\n")).collect::<Vec<_>>().concat()),
        Case::new("config show --config {}/a.toml", &["{}/a.toml", "not UTF-8 text", "is it the right one?"])
            .file("a.toml", vec![0xff, 0xfe]),
        Case::new("config show --config /no/such/file", &["/no/such/file", "No such file"]),
        Case::new("config show --config", &["a value is required for '--config <F>'"]),
        Case::new("launch -n 2 --config {}/absent -- true", &["{}/absent", "No such file"]),
        Case::new("config show", &["ryzanstein.toml", "this is a folder"])
            .file("ryzanstein.toml", Content::Folder),
        Case::new("check", &["ryzanstein.toml", "not well-formed TOML"]).file("ryzanstein.toml", "x"),
    ];
    for (content, word) in [
        (Content::Pipe, "this is a pipe"),
        (Content::Sparse(1 << 40), "more than 1MiB"),
        (Content::Writable("[job]"), "it has mode 0666, so other users can write it"),
    ] {
        let words = ["the configuration file {}/a.toml", word];
        cases.push(Case::new("config show --config {}/a.toml", &words).named(word).file("a.toml", content));
    }
    cases
}

/// Settings of other users: none of the libraries that they name may be loaded.
pub(crate) fn of_others() -> Vec<Case> {
    const LIBRARY: &str = "[device]\ncuda = '/no/such/libcuda.so.1'\n";
    let mut contents = vec![(Content::Writable(LIBRARY), "it has mode 0666, so other users can write it")];
    if rustix::process::geteuid().is_root() {
        contents.push((Content::Foreign(LIBRARY), "it belongs to user 65534, not to user 0 or root"));
    } else {
        eprintln!("skipped: only root can make a file of another user");
    }
    let commands = ["doctor", "launch -n 1 -- true", "launch -n 1", "check", "config show", "tune --nccl"];
    let mut cases = Vec::new();
    for (content, why) in contents {
        for command in commands {
            let words = ["cannot read the configuration file ryzanstein.toml: ", why];
            let case = Case::new(command, &words).named(why).without("libcuda");
            cases.push(case.file("ryzanstein.toml", content.clone()));
        }
    }
    cases
}

/// Returns the cases about the rendezvous.
pub(crate) fn joining() -> Vec<Case> {
    let check = |words: &[&str]| Case::new("check", words);
    let master = |words: &[&str]| {
        check(words)
            .variable("MASTER_ADDR", "127.0.0.1")
            .variable("MASTER_PORT", "1")
            .variable("WORLD_SIZE", "2")
    };
    let secret = |words: &[&str]| {
        check(words)
            .variable("RYZ_RENDEZVOUS", "127.0.0.1:1")
            .variable("RYZ_SECRET_FILE", "{}/secret")
            .variable("WORLD_SIZE", "1")
    };
    vec![
        check(&["WORLD_SIZE", "from 1 to 65536", "not `4294967295`"]).variable("WORLD_SIZE", "4294967295"),
        check(&["WORLD_SIZE", "a whole number", "not nothing"]).variable("WORLD_SIZE", ""),
        check(&["this job has 2 ranks", "ryz launch --world-size 2"]).variable("WORLD_SIZE", "2"),
        check(&["RANK is set", "MASTER_ADDR, the rendezvous address, is not", "MASTER_PORT"])
            .variable("WORLD_SIZE", "2")
            .variable("RANK", "0"),
        check(&["MASTER_ADDR is set, but MASTER_PORT is not"]).variable("MASTER_ADDR", "127.0.0.1"),
        master(&["MASTER_ADDR is set, but RANK is not", "set RANK and WORLD_SIZE", "unset MASTER_ADDR"]),
        master(&["RANK is 2, but WORLD_SIZE is 2"]).variable("RANK", "2"),
        master(&["RANK is `x`, not a whole number"]).variable("RANK", "x"),
        master(&["MASTER_PORT is `x`"]).variable("RANK", "0").variable("MASTER_PORT", "x"),
        master(&["MASTER_PORT is 70000", "65535"]).variable("RANK", "0").variable("MASTER_PORT", "70000"),
        master(&["MASTER_PORT is 0", "from 1 to"]).variable("RANK", "0").variable("MASTER_PORT", "0"),
        master(&["MASTER_ADDR is `a:1`", "a host without a port, such as `node0`"])
            .variable("RANK", "0")
            .variable("MASTER_ADDR", "a:1"),
        master(&["MASTER_ADDR is ``", "a host without a port"])
            .variable("RANK", "0")
            .variable("MASTER_ADDR", ""),
        master(&["RANK is 2, but WORLD_SIZE is 2"])
            .named("MASTER_ADDR in brackets")
            .variable("RANK", "2")
            .variable("MASTER_ADDR", "[::1] "),
        master(&["MASTER_ADDR", "has no address"])
            .variable("RANK", "0")
            .variable("MASTER_ADDR", "no-such-host.invalid")
            .variable("RYZ_RENDEZVOUS__TIMEOUT", "1s")
            .code(1),
        master(&["WORLD_SIZE", "from 1 to 65536"]).variable("RANK", "0").variable("WORLD_SIZE", "4294967295"),
        master(&["needs a secret", "RYZ_SECRET_FILE", "mode 0600"])
            .variable("RANK", "1")
            .variable("MASTER_ADDR", "192.0.2.1"),
        check(&["RYZ_RENDEZVOUS", "HOST:PORT", "the port is missing"]).variable("RYZ_RENDEZVOUS", "node"),
        check(&["neither RYZ_SECRET_FD nor RYZ_SECRET_FILE"]).variable("RYZ_RENDEZVOUS", "127.0.0.1:1"),
        check(&["RYZ_SECRET_FD is `x`"])
            .variable("RYZ_RENDEZVOUS", "127.0.0.1:1")
            .variable("RYZ_SECRET_FD", "x"),
        check(&["descriptor 999", "was not handed down", "leave descriptors open"])
            .variable("RYZ_RENDEZVOUS", "127.0.0.1:1")
            .variable("RYZ_SECRET_FD", "999"),
        check(&["descriptor 0", "this is a device", "leave descriptors open"])
            .variable("RYZ_RENDEZVOUS", "127.0.0.1:1")
            .variable("RYZ_SECRET_FD", "0"),
        secret(&["{}/secret", "No such file", "head -c 32 /dev/urandom"]),
        secret(&["{}/secret", "has mode", "chmod 0600"]).file("secret", "0f".repeat(32)),
        secret(&["{}/secret"]).named("a pipe").file("secret", Content::Pipe),
        secret(&["{}/secret"]).named("a link").file("secret", Content::Device),
    ]
}
