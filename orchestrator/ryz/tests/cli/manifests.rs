//! The manifests in `docs/deploy`: the command of a pod, run once for each pod with the variables that its controller sets.

use std::path::Path;
use std::process::Command;

use crate::support::{Run, ryz, text};

const PODS: u32 = 2;

/// The script of a manifest's pods.
fn script(manifest: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/deploy").join(manifest);
    let manifest = std::fs::read_to_string(path).expect("a manifest");
    let line = manifest.lines().find_map(|line| line.trim().strip_prefix("command: ")).expect("a command");
    let script = line.strip_prefix("[sh, -c, '").and_then(|line| line.strip_suffix("']"));
    script.expect("a script of the shell").to_owned()
}

/// Checks a job of all pods. `set` are the variables of one of them.
fn pods_find_each_other(manifest: &str, set: impl Fn(&str) -> Vec<(&'static str, String)>) {
    let script = script(manifest);
    // Each pod has ports of its own; these share the host's.
    let free = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = free.local_addr().expect("an address").port();
    drop(free);
    let ryz = std::path::PathBuf::from(ryz());
    let path = format!("{}:/usr/bin:/bin", ryz.parent().expect("a folder").display());
    let pods: Vec<(Run, tempfile::TempDir)> = (0..PODS)
        .map(|pod| {
            let home = tempfile::tempdir().expect("a home");
            let mut command = Command::new("sh");
            command.args(["-c", &script]).env_clear().envs(set(&pod.to_string()));
            command.env("PATH", &path).env("HOME", home.path()).env("SECRET", "5e".repeat(32));
            command.env("MASTER_PORT", port.to_string()).env("RYZ_PROCESS_GROUP__BACKEND", "tcp");
            (Run::of(command), home)
        })
        .collect();
    for (pod, (run, _home)) in pods.into_iter().enumerate() {
        let output = run.finish();
        assert!(output.status.success(), "{manifest}, pod {pod}: {}", text(&output.stderr));
    }
}

#[test]
fn the_pods_of_an_indexed_job_find_each_other() {
    pods_find_each_other("indexed-job.yaml", |pod| {
        vec![
            ("JOB_COMPLETION_INDEX", pod.into()),
            ("WORLD_SIZE", PODS.to_string()),
            ("MASTER_ADDR", "127.0.0.1".into()),
        ]
    });
}

#[test]
fn the_pods_of_a_leader_worker_set_find_each_other() {
    pods_find_each_other("leader-worker-set.yaml", |pod| {
        vec![
            ("LWS_WORKER_INDEX", pod.into()),
            ("LWS_GROUP_SIZE", PODS.to_string()),
            ("LWS_LEADER_ADDRESS", "127.0.0.1".into()),
        ]
    });
}

#[test]
fn the_pods_of_a_train_job_find_each_other() {
    pods_find_each_other("train-job.yaml", |pod| {
        vec![
            ("PET_NODE_RANK", pod.into()),
            ("PET_NNODES", PODS.to_string()),
            ("PET_NPROC_PER_NODE", "1".into()),
            ("PET_MASTER_ADDR", "127.0.0.1".into()),
            ("PET_MASTER_PORT", "29500".into()),
        ]
    });
}
