use ryzanstein_config::WorldSize;

use super::*;

fn environment(variables: &str) -> Environment {
    variables
        .split_whitespace()
        .map(|variable| variable.split_once('=').expect("NAME=VALUE"))
        .map(|(name, value)| (name.into(), value.into()))
        .collect()
}

/// Returns the variables that are added to these, in the order of their names; or the error.
fn added(choice: LauncherChoice, variables: &str) -> Result<String, String> {
    let mut config = Config::default();
    config.rendezvous.launcher = choice;
    let before = environment(variables);
    let after = translated(&config, &before).map_err(|error| error.to_string())?;
    assert_eq!(translated(&config, &after).expect("as before"), after, "a second time adds nothing");
    let added = after.iter().filter(|(name, value)| before.get(*name) != Some(*value));
    Ok(added.map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>().join(" "))
}

const SLURM: &str = "SLURM_JOB_ID=7 SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=4 SLURM_PROCID=2 SLURM_LOCALID=0 SLURM_NODEID=1 \
                     SLURM_STEP_NUM_NODES=2 SLURM_STEP_NODELIST=n[01-02]";
const OPEN_MPI: &str = "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=4 \
                        OMPI_COMM_WORLD_NODE_RANK=1 PMIX_RANK=1 PMIX_NAMESPACE=job@1";
const PMI: &str = "PMI_RANK=3 PMI_SIZE=4 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2";
const LWS: &str = "LWS_LEADER_ADDRESS=lws-0.lws LWS_GROUP_SIZE=2 LWS_WORKER_INDEX=1";
const KUBEFLOW: &str = "PET_NNODES=2 PET_NPROC_PER_NODE=1 PET_NODE_RANK=1 PET_MASTER_ADDR=job-node-0-0.job PET_MASTER_PORT=29400";
const TORCHRUN: &str =
    "TORCHELASTIC_RUN_ID=x RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 GROUP_RANK=2 MASTER_ADDR=n01 MASTER_PORT=29500";

#[test]
fn each_launcher_is_translated_to_torchruns_names() {
    let slurm = port_of("7.0");
    let job = port_of("job@1");
    for (variables, expected) in [
        (
            SLURM.to_owned(),
            format!("GROUP_RANK=1 LOCAL_RANK=0 MASTER_ADDR=n01 MASTER_PORT={slurm} RANK=2 WORLD_SIZE=4"),
        ),
        // On one host, ranks meet at an address that needs no copy of the secret.
        (
            SLURM.replace("NODES=2", "NODES=1"),
            format!(
                "GROUP_RANK=1 LOCAL_RANK=0 MASTER_ADDR=127.0.0.1 MASTER_PORT={slurm} RANK=2 WORLD_SIZE=4"
            ),
        ),
        (
            OPEN_MPI.into(),
            format!("LOCAL_RANK=1 MASTER_ADDR=127.0.0.1 MASTER_PORT={job} RANK=1 WORLD_SIZE=4"),
        ),
        (format!("{PMI} MASTER_ADDR=n01 MASTER_PORT=29511"), "LOCAL_RANK=1 RANK=3 WORLD_SIZE=4".into()),
        (
            LWS.into(),
            "GROUP_RANK=1 LOCAL_RANK=0 MASTER_ADDR=lws-0.lws MASTER_PORT=29500 RANK=1 WORLD_SIZE=2".into(),
        ),
        (
            KUBEFLOW.into(),
            "GROUP_RANK=1 LOCAL_RANK=0 MASTER_ADDR=job-node-0-0.job MASTER_PORT=29400 RANK=1 WORLD_SIZE=2"
                .into(),
        ),
        (
            "JOB_COMPLETION_INDEX=3 WORLD_SIZE=4 MASTER_ADDR=job-0.job".into(),
            "GROUP_RANK=3 LOCAL_RANK=0 MASTER_PORT=29500 RANK=3".into(),
        ),
    ] {
        assert_eq!(added(LauncherChoice::Auto, &variables), Ok(expected), "{variables}");
    }
}

#[test]
fn ranks_of_torchrun_meet_elsewhere_than_at_its_own_store() {
    let port = port_of("x:29500");
    let expected = format!("MASTER_PORT={port} TORCHELASTIC_USE_AGENT_STORE=False");
    let store = format!("{TORCHRUN} TORCHELASTIC_USE_AGENT_STORE=True");
    assert_eq!(added(LauncherChoice::Auto, &store), Ok(expected.clone()));
    assert_eq!(added(LauncherChoice::Torchrun, &store), Ok(expected.clone()));
    let several_hosts = format!("{store} LOCAL_WORLD_SIZE=4");
    assert_eq!(added(LauncherChoice::Auto, &several_hosts), Ok(expected.clone()));
    let one_host = format!("{store} LOCAL_WORLD_SIZE=8");
    assert_eq!(added(LauncherChoice::Auto, &one_host), Ok(format!("MASTER_ADDR=127.0.0.1 {expected}")));
    for free in ["", "TORCHELASTIC_USE_AGENT_STORE=False"] {
        assert_eq!(added(LauncherChoice::Auto, &format!("{TORCHRUN} {free}")), Ok(String::new()));
    }
}

#[test]
fn what_the_user_says_of_the_place_to_meet_holds() {
    let variables = format!("{SLURM} MASTER_ADDR=n02 MASTER_PORT=29511");
    assert_eq!(
        added(LauncherChoice::Auto, &variables),
        Ok("GROUP_RANK=1 LOCAL_RANK=0 RANK=2 WORLD_SIZE=4".into())
    );
}

#[test]
fn ordinary_processes_are_left_as_they_are() {
    for variables in [
        String::new(),
        // A batch script of Slurm, and a shell within an allocation.
        "SLURM_JOB_ID=7 SLURM_NTASKS=4 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0".into(),
        "SLURM_JOB_ID=7 SLURM_NTASKS=4".into(),
        // Single tasks.
        SLURM.replace("TASKS=4", "TASKS=1").replace("PROCID=2", "PROCID=0"),
        "OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=1 PMIX_RANK=0".into(),
        "LWS_LEADER_ADDRESS=lws-0.lws LWS_GROUP_SIZE=1 LWS_WORKER_INDEX=0".into(),
        // One item of a list of work.
        "JOB_COMPLETION_INDEX=3".into(),
        // Our own launcher.
        format!("{SLURM} RYZ_RENDEZVOUS=n01:29500 RANK=5 WORLD_SIZE=8"),
    ] {
        assert_eq!(added(LauncherChoice::Auto, &variables), Ok(String::new()), "{variables}");
    }
}

#[test]
fn a_single_task_that_is_to_be_several_ranks_is_an_ordinary_process() {
    let mut config = Config::default();
    let single = "RANK=0 WORLD_SIZE=1";
    for (variables, left) in [
        (single.to_owned(), ""),
        (format!("{single} LOCAL_RANK=0 MASTER_ADDR=job-0.job MASTER_PORT=29500"), ""),
        (format!("{single} TORCHELASTIC_RUN_ID=x"), "TORCHELASTIC_RUN_ID=x"),
        (format!("{single} RYZ_RENDEZVOUS=n01:29500"), "RANK=0 RYZ_RENDEZVOUS=n01:29500 WORLD_SIZE=1"),
        ("RANK=0 WORLD_SIZE=2".into(), "RANK=0 WORLD_SIZE=2"),
        ("RANK=1 WORLD_SIZE=1".into(), "RANK=1 WORLD_SIZE=1"),
    ] {
        let before = environment(&variables);
        for (ranks, after) in [(None, &before), (Some(1), &before), (Some(2), &environment(left))] {
            config.job.world_size = ranks.and_then(|ranks| WorldSize::new(ranks).ok());
            assert_eq!(translated(&config, &before).as_ref().ok(), Some(after), "{variables}, {ranks:?}");
        }
    }
}

#[test]
fn a_launcher_within_another_has_its_say() {
    for outer in [SLURM, OPEN_MPI, PMI, LWS, KUBEFLOW] {
        assert_eq!(added(LauncherChoice::Auto, &format!("{TORCHRUN} {outer}")), Ok(String::new()), "{outer}");
    }
    let pods = KUBEFLOW.replace("PER_NODE=1", "PER_NODE=8");
    assert_eq!(added(LauncherChoice::Auto, &format!("{TORCHRUN} {pods}")), Ok(String::new()));
    for outer in [SLURM, LWS] {
        let added = added(LauncherChoice::Auto, &format!("{OPEN_MPI} {outer}")).expect("mpirun");
        assert!(added.contains("RANK=1 WORLD_SIZE=4"), "{outer}: {added}");
    }
}

#[test]
fn launchers_that_agree_complete_each_other() {
    let variables = format!("{SLURM} PMIX_RANK=2 PMIX_NAMESPACE=slurm.pmix.7.0");
    let added = added(LauncherChoice::Auto, &variables).expect("they agree");
    assert!(added.contains("MASTER_ADDR=n01") && added.contains("RANK=2 WORLD_SIZE=4"), "{added}");
}

#[test]
fn launchers_that_contradict_each_other_are_named_until_one_is_chosen() {
    for (other, words) in [
        (PMI, "pmi says rank 3 of 4, slurm says rank 2 of 4"),
        ("RANK=5 WORLD_SIZE=8", "torchrun says rank 5 of 8, slurm says rank 2 of 4"),
        ("RANK=2 WORLD_SIZE=8", "torchrun says rank 2 of 8, slurm says rank 2 of 4"),
        ("PMIX_RANK=1", "pmix says rank 1, slurm says rank 2 of 4"),
    ] {
        let variables = format!("{SLURM} {other}");
        let error = added(LauncherChoice::Auto, &variables).expect_err(words);
        assert!(error.contains(words) && error.contains("RYZ_RENDEZVOUS__LAUNCHER"), "{error}");
        let chosen = added(LauncherChoice::Slurm, &variables).expect("chosen");
        assert!(!other.starts_with("RANK=5") || chosen.contains("RANK=2 WORLD_SIZE=4"), "{chosen}");
        assert_eq!(added(LauncherChoice::Torchrun, &variables), Ok(String::new()));
    }
}

#[test]
fn what_is_wrong_or_missing_is_named() {
    for (choice, variables, words) in [
        (
            LauncherChoice::Auto,
            SLURM.replace("PROCID=2", "PROCID=x"),
            "SLURM_PROCID is `x`, not a whole number",
        ),
        (
            LauncherChoice::Auto,
            OPEN_MPI.replace("LOCAL_SIZE=4", "LOCAL_SIZE=2"),
            "open_mpi says rank 1 of 4, and nothing says where the ranks meet; set MASTER_ADDR",
        ),
        (
            LauncherChoice::Auto,
            PMI.replace("NRANKS=2", "NRANKS=4"),
            "set MASTER_PORT, for every rank, to a free port",
        ),
        (
            LauncherChoice::Auto,
            KUBEFLOW.replace("PER_NODE=1", "PER_NODE=8"),
            "start them with `ryz launch --nnodes",
        ),
        (
            LauncherChoice::Slurm,
            OPEN_MPI.into(),
            "rendezvous.launcher is slurm, and this process has none of its variables",
        ),
    ] {
        let error = added(choice, &variables).expect_err(words);
        assert!(error.contains(words), "{error}");
    }
}

#[test]
fn every_launcher_but_torchrun_has_a_reader() {
    let readers = READERS.iter().map(|(launcher, _)| *launcher);
    let all = [LauncherChoice::Auto, LauncherChoice::Torchrun].into_iter().chain(readers);
    assert_eq!(all.collect::<Vec<_>>().len(), LauncherChoice::ALL.len());
    for choice in LauncherChoice::ALL {
        // No call panics.
        let _ = detect(*choice, &Environment::new());
    }
}

#[test]
fn the_first_host_of_slurms_lists() {
    for (list, expected) in [
        ("n01", "n01"),
        ("n01,n02", "n01"),
        ("n[01-04,7],m1", "n01"),
        ("n[7,9]", "n7"),
        ("m1,n[01-04]", "m1"),
        ("r[1-2]n[3-4]-ib", "r1n3-ib"),
        ("node-a[001-010]", "node-a001"),
    ] {
        assert_eq!(first_host(list), expected, "{list}");
    }
}

#[test]
fn ports_derived_from_jobs_are_behind_those_of_outgoing_connections() {
    for job in 0..10_000 {
        let port = port_of(&format!("{job}.0"));
        assert!(port >= FIRST_PORT, "{port}");
    }
}
