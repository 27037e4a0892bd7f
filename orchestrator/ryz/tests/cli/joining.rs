//! Joining of ranks: secrets, ranks that never come, restarts, several nodes, other launchers.

use std::net::TcpListener;

use crate::support::{Run, report, text};

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

#[test]
fn two_launchers_make_one_job_of_two_nodes() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("secret");
    std::fs::write(&path, [9; 32]).expect("written");
    std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o600)).expect("chmod");
    let free =
        TcpListener::bind("127.0.0.1:0").expect("a port").local_addr().expect("an address").to_string();
    let node = |node| {
        Run::new(
            &["launch", "-n", "4", "--nnodes", "2", "--node-rank", node, "--rendezvous", &free],
            &[("RYZ_SECRET_FILE", path.to_str().expect("a path"))],
        )
    };
    let (second, first) = (node("1"), node("0"));
    let (first, second) = (first.finish(), second.finish());
    assert!(
        first.status.success() && second.status.success(),
        "{}",
        text(&first.stderr) + &text(&second.stderr)
    );
    assert!(text(&first.stdout).contains("4 ranks, epoch 1"), "{}", text(&first.stdout));
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
