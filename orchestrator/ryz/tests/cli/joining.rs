//! Joining of ranks: secrets, ranks that never come, restarts, several nodes, other launchers.

use std::net::TcpListener;

use rustix::process::Signal;
use tempfile::TempDir;

use crate::support::{Run, eventually, report, text};

#[test]
fn a_process_with_another_secret_is_told_so() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("secret");
    std::fs::write(&path, [7; 32]).expect("written");
    std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o600)).expect("chmod");
    let script = format!(
        "unset RYZ_SECRET_FD; RYZ_SECRET_FILE={} {} check",
        path.display(),
        env!("CARGO_BIN_EXE_ryz")
    );
    let output = Run::launch(&["--world-size", "1"], &script).finish();
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("does not know this job's secret"), "{}", text(&output.stderr));
}

#[test]
fn a_rank_that_never_arrives_is_named() {
    let script = format!("[ $RANK = 1 ] && exec sleep 608; exec {} check", env!("CARGO_BIN_EXE_ryz"));
    let output = Run::launch(&["--world-size", "3", "--timeout", "1"], &script).finish();
    assert_eq!(output.status.code(), Some(1));
    let stderr = text(&output.stderr);
    assert!(stderr.contains("rank 1 is not there"), "{stderr}");
}

#[test]
fn a_rank_that_ends_without_joining_is_named_without_waiting_for_the_deadline() {
    let script = format!("[ $RANK = 1 ] && exit 0; exec {} check", env!("CARGO_BIN_EXE_ryz"));
    let output = Run::launch(&["--world-size", "2", "--timeout", "1h", "--format", "json"], &script).finish();
    assert_eq!(output.status.code(), Some(1));
    let cause = report(&output)["first_failure"]["cause"].to_string();
    assert!(cause.contains("rank 1 exited with code 0 without joining"), "{cause}");
}

#[test]
fn a_failed_job_is_started_again_under_a_new_epoch() {
    let folder = tempfile::tempdir().expect("a folder");
    // Only the first epoch fails; all of the second meet at the rendezvous.
    let script = format!(
        "touch $D/$RYZ_EPOCH-$RANK; [ $RYZ_EPOCH$RANK = 11 ] && exit 5; exec {} check",
        env!("CARGO_BIN_EXE_ryz")
    );
    let run = Run::new(
        &["launch", "-n", "2", "--max-restarts", "2", "--format", "json", "--", "sh", "-c", &script],
        &[("D", folder.path().to_str().expect("a path"))],
    );
    let output = run.finish();
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert_eq!(report(&output)["epoch"], 2);
    assert!(folder.path().join("2-0").exists() && !folder.path().join("3-0").exists());
}

/// A job on several nodes, all of them this host.
struct SeveralNodes {
    /// Holds the secret, and what the ranks write; ranks know it as `$D`.
    folder: TempDir,
    address: String,
}

impl SeveralNodes {
    fn new() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("secret");
        std::fs::write(&path, [9; 32]).expect("written");
        std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o600)).expect("chmod");
        let free = TcpListener::bind("127.0.0.1:0").expect("a port").local_addr().expect("an address");
        Self { folder, address: free.to_string() }
    }

    /// Starts the launcher of one node, with these flags and then the program.
    fn launch(&self, flags: &str, program: &[&str]) -> Run {
        let flags: Vec<&str> = flags.split_whitespace().collect();
        let folder = self.folder.path().to_str().expect("a path");
        let secret = format!("{folder}/secret");
        Run::new(
            &[&["launch", "--rendezvous", self.address.as_str()], &flags[..], program].concat(),
            &[("RYZ_SECRET_FILE", secret.as_str()), ("D", folder)],
        )
    }

    /// Ends the loop [`UNTIL_GO`].
    fn go(&self) {
        std::fs::write(self.folder.path().join("go"), "").expect("written");
    }
}

const UNTIL_GO: &str = "until [ -e $D/go ]; do sleep 0.05; done";

#[test]
fn two_launchers_make_one_job_of_two_nodes() {
    let job = SeveralNodes::new();
    let [second, first] =
        ["1", "0"].map(|node| job.launch(&format!("-n 4 --nnodes 2 --node-rank {node}"), &[]));
    let (first, second) = (first.finish(), second.finish());
    assert!(
        first.status.success() && second.status.success(),
        "{}",
        text(&first.stderr) + &text(&second.stderr)
    );
    assert!(text(&first.stdout).contains("4 ranks, epoch 1"), "{}", text(&first.stdout));
}

#[test]
fn a_rank_that_fails_ends_the_launchers_of_all_nodes_and_they_name_it() {
    // Ranks 0 and 1 are on node 0, rank 2 on node 1, rank 3 on node 2. They do not use the library.
    for (node, rank) in [(0, 1), (1, 2)] {
        let job = SeveralNodes::new();
        let script = format!("[ $RANK = {rank} ] && {{ {UNTIL_GO}; kill -9 $$; }}; exec sleep 609");
        let launchers = [0, 1, 2].map(|node| {
            job.launch(&format!("-n 4 --nnodes 3 --node-rank {node}"), &["--", "sh", "-c", &script])
        });
        let others = [[1, 1, 1], [2, 0, 1]][node];
        for (launcher, ranks) in launchers.iter().zip(others) {
            launcher.wait_for(ranks, "sleep 609");
        }
        job.go();
        for (place, launcher) in launchers.into_iter().enumerate() {
            let output = launcher.finish();
            let stderr = text(&output.stderr);
            let (code, named) = if place == node {
                (137, format!("first failure: rank {rank} (host "))
            } else {
                (1, format!("cause: node {node}: rank {rank} (host "))
            };
            assert_eq!(output.status.code(), Some(code), "node {place}: {stderr}");
            assert!(stderr.contains(&named), "node {place}: {stderr}");
        }
    }
}

#[test]
fn nodes_may_end_at_different_times_and_the_first_knows_how_all_have_ended() {
    for (early, late, codes) in [("0", 0, [0, 0]), ("1", 0, [0, 0]), ("0", 9, [1, 9])] {
        let job = SeveralNodes::new();
        let script =
            format!("[ $GROUP_RANK = {early} ] && {{ touch $D/early; exit; }}; {UNTIL_GO}; exit {late}");
        let launchers = ["0", "1"].map(|node| {
            job.launch(&format!("-n 2 --nnodes 2 --node-rank {node}"), &["--", "sh", "-c", &script])
        });
        let has_ended = || job.folder.path().join("early").exists().then_some(());
        assert!(eventually(has_ended).is_some(), "node {early} has not ended");
        job.go();
        let outputs = launchers.map(Run::finish);
        let told = outputs.each_ref().map(|output| text(&output.stderr));
        assert_eq!(outputs.map(|output| output.status.code()), codes.map(Some), "{told:?}");
        assert_eq!(told[0].contains("cause: node 1: rank 1 (host "), late != 0, "{told:?}");
    }
}

#[test]
fn a_launcher_that_is_ended_ends_those_of_the_other_nodes() {
    let of_supervisor = |run: &Run| {
        let pid = rustix::process::Pid::from_raw(run.supervisor() as i32).expect("a pid");
        rustix::process::kill_process(pid, Signal::KILL).expect("killed");
    };
    let of_launcher = |run: &Run| run.signal(Signal::TERM);
    for (ended, end, expected) in [
        (0, &of_launcher as &dyn Fn(&Run), "node 0: its launcher was ended by signal 15 (SIGTERM)"),
        (1, &of_launcher, "node 1: its launcher was ended by signal 15 (SIGTERM)"),
        // Its address.
        (0, &of_supervisor, "127.0.0.1:"),
    ] {
        let job = SeveralNodes::new();
        let [first, second] = ["0", "1"]
            .map(|node| job.launch(&format!("-n 2 --nnodes 2 --node-rank {node}"), &["--", "sleep", "610"]));
        for launcher in [&first, &second] {
            launcher.wait_for(1, "sleep 610");
        }
        let (ended, other) = if ended == 0 { (first, second) } else { (second, first) };
        end(&ended);
        let output = other.finish();
        let stderr = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{stderr}");
        assert!(stderr.contains(expected), "{stderr}");
        assert!(!ended.finish().status.success());
    }
}

#[test]
fn a_launcher_that_does_not_belong_to_the_job_is_refused_and_the_others_go_on() {
    let usual = "-n 2 --nnodes 2 --node-rank 1";
    for (flags, expected) in [
        (usual, "another launcher of node 1 in this job; give every launcher its own --node-rank"),
        ("-n 3 --nnodes 3 --node-rank 1", "started for 3 ranks on 3 nodes, but that of the first node"),
    ] {
        let job = SeveralNodes::new();
        let launch = |flags| job.launch(flags, &["--", "sh", "-c", UNTIL_GO]);
        let first = launch("-n 2 --nnodes 2 --node-rank 0");
        // Of two that are equal, either is refused.
        let seconds = [usual, flags].map(launch);
        let refused = || seconds.iter().any(|launcher| launcher.family().is_empty()).then_some(());
        assert!(eventually(refused).is_some(), "both go on");
        job.go();
        assert!(first.finish().status.success());
        let mut seconds = seconds.map(Run::finish);
        seconds.sort_by_key(|output| output.status.code());
        let stderr = text(&seconds[1].stderr);
        assert_eq!(seconds.map(|output| output.status.code()), [Some(0), Some(1)], "{stderr}");
        assert!(stderr.contains(expected), "{stderr}");
    }
}

#[test]
fn ranks_of_another_launcher_meet_at_rank_0() {
    let folder = tempfile::tempdir().expect("a folder");
    let free = TcpListener::bind("127.0.0.1:0")
        .expect("a port")
        .local_addr()
        .expect("an address")
        .port()
        .to_string();
    let rank = |rank| {
        Run::new(
            &["check"],
            &[
                ("RANK", rank),
                ("WORLD_SIZE", "2"),
                ("MASTER_ADDR", "127.0.0.1"),
                ("MASTER_PORT", &free),
                ("XDG_RUNTIME_DIR", folder.path().to_str().expect("a path")),
            ],
        )
    };
    let (one, zero) = (rank("1"), rank("0"));
    let (zero, one) = (zero.finish(), one.finish());
    assert!(zero.status.success() && one.status.success(), "{}", text(&zero.stderr) + &text(&one.stderr));
    assert!(text(&zero.stdout).contains("2 ranks, epoch 1"));
    assert_eq!(std::fs::read_dir(folder.path()).expect("a folder").count(), 0, "the secret is gone");
}

/// Two processes with these variables, in which `{}` stands for the rank; what each said, if both succeeded.
fn two_ranks_of(variables: &[(&str, &str)]) -> [String; 2] {
    let folder = tempfile::tempdir().expect("a folder");
    let rank = |rank: &str| {
        let mut environment = vec![("XDG_RUNTIME_DIR", folder.path().to_str().expect("a path").to_owned())];
        environment.extend(variables.iter().map(|(name, value)| (*name, value.replace("{}", rank))));
        let environment: Vec<_> = environment.iter().map(|(name, value)| (*name, value.as_str())).collect();
        Run::new(&["check", "-v"], &environment)
    };
    let ranks = [rank("0"), rank("1")];
    ranks.map(|run| {
        let output = run.finish();
        assert!(output.status.success(), "{}", text(&output.stderr));
        text(&output.stdout) + &text(&output.stderr)
    })
}

#[test]
fn tasks_of_slurm_and_mpi_join_without_a_translation() {
    // A job of its own for every run, so that ports differ.
    let job = std::process::id().to_string();
    let slurm = [
        ("SLURM_JOB_ID", &*job),
        ("SLURM_STEP_ID", "0"),
        ("SLURM_STEP_NUM_TASKS", "2"),
        ("SLURM_STEP_NUM_NODES", "1"),
        ("SLURM_STEP_NODELIST", "node0"),
        ("SLURM_PROCID", "{}"),
        ("SLURM_LOCALID", "{}"),
        ("SLURM_NODEID", "0"),
    ];
    let open_mpi = [
        ("OMPI_COMM_WORLD_RANK", "{}"),
        ("OMPI_COMM_WORLD_SIZE", "2"),
        ("OMPI_COMM_WORLD_LOCAL_RANK", "{}"),
        ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
        ("PMIX_RANK", "{}"),
        ("PMIX_NAMESPACE", &*job),
    ];
    for (variables, named) in
        [(&slurm[..], "slurm says rank 1 of 2"), (&open_mpi, "open_mpi says rank 1 of 2")]
    {
        let [zero, one] = two_ranks_of(variables);
        assert!(zero.contains("2 ranks, epoch 1"), "{zero}");
        assert!(one.contains(named), "{one}");
    }
}

#[test]
fn a_pod_with_a_single_task_starts_the_ranks_that_are_demanded() {
    let single = [("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "job-0.job"), ("MASTER_PORT", "29500")];
    let demanded = [&single[..], &[("RYZ_JOB__WORLD_SIZE", "2")]].concat();
    for (arguments, variables) in [(&["check", "-n", "2"][..], &single[..]), (&["check"][..], &demanded[..])]
    {
        let output = Run::new(&[arguments, &["--backend", "tcp"]].concat(), variables).finish();
        assert!(output.status.success(), "{}", text(&output.stderr));
        assert!(text(&output.stdout).contains("2 ranks, epoch 1"), "{}", text(&output.stdout));
    }
}

#[test]
fn a_rank_whose_flag_demands_another_number_of_ranks_is_refused() {
    for command in ["check", "bench"] {
        let arguments = ["launch", "-n", "1", "--", env!("CARGO_BIN_EXE_ryz"), command, "-n", "2"];
        let output = Run::new(&arguments, &[]).finish();
        let stderr = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{stderr}");
        assert!(
            stderr.contains("flag --world-size demands 2 ranks") && stderr.contains("one of 1 "),
            "{stderr}"
        );
    }
}

#[test]
fn launchers_that_contradict_each_other_are_refused() {
    let environment = [
        ("SLURM_STEP_ID", "0"),
        ("SLURM_NTASKS", "2"),
        ("SLURM_PROCID", "1"),
        ("PMI_RANK", "0"),
        ("PMI_SIZE", "2"),
    ];
    for command in [&["check"][..], &["bench"]] {
        let output = Run::new(command, &environment).finish();
        let stderr = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{stderr}");
        assert!(stderr.contains("pmi says rank 0 of 2, slurm says rank 1 of 2"), "{stderr}");
    }
}
