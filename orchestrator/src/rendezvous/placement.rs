//! PURE: the rank and the job that another launcher gave this process, from the variables that the launcher set.

use std::fmt;

use ryzanstein_config::{Config, LauncherChoice};
use ryzanstein_process_group::{Error, Result};

use super::Environment;

/// The place that a launcher gave this process, as far as its variables tell.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Placement {
    /// The launcher that set the variables.
    pub launcher: LauncherChoice,
    /// The rank, from 0.
    pub rank: u32,
    /// The number of ranks.
    pub world_size: Option<u32>,
    /// The rank on the host.
    pub local_rank: Option<u32>,
    /// The rank of the host.
    pub node_rank: Option<u32>,
    /// The host of rank 0, where the ranks meet.
    pub host: Option<String>,
    /// The port on that host.
    pub port: Option<u16>,
}

impl fmt::Display for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} says rank {}", self.launcher.name(), self.rank)?;
        self.world_size.map_or(Ok(()), |ranks| write!(f, " of {ranks}"))
    }
}

/// The first of the ports that are derived from a job's number: after those that Linux gives to outgoing connections.
const FIRST_PORT: u16 = 61440;
/// Number of those ports.
const PORTS: u64 = 4096;
/// The port in a pod, whose ports are not shared; the same as torchrun's.
const POD_PORT: u16 = 29500;

/// Reads a launcher's variables; `None` if they are not set.
type Reader = fn(&Environment) -> Result<Option<Placement>>;

/// All launchers except torchrun, whose names are the target of the translation. Processes of an earlier one may have been
/// started within a later one.
const READERS: [(LauncherChoice, Reader); 7] = [
    (LauncherChoice::OpenMpi, open_mpi),
    (LauncherChoice::Pmi, pmi),
    (LauncherChoice::Pmix, pmix),
    (LauncherChoice::Slurm, slurm),
    (LauncherChoice::LeaderWorkerSet, leader_worker_set),
    (LauncherChoice::Kubeflow, kubeflow),
    (LauncherChoice::IndexedJob, indexed_job),
];

/// torchrun's variables.
const TORCHRUN: [&str; 6] = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"];

/// Returns the environment with torchrun's variables (`RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `GROUP_RANK`, `MASTER_ADDR`,
/// `MASTER_PORT`) added, if another launcher gave the same facts in its own variables. The user's `MASTER_ADDR` and
/// `MASTER_PORT` stay. Under torchrun, whose own store listens at `MASTER_PORT`, they name another place. All six are removed from
/// a single task if the settings demand several ranks.
///
/// # Errors
/// Returns the errors of [`detect`].
pub fn translated(config: &Config, environment: &Environment) -> Result<Environment> {
    let mut environment = environment.clone();
    leave_a_single_task(config, &mut environment);
    leave_torchruns_port(&mut environment);
    let Some(placement) = detect(config.rendezvous.launcher, &environment)? else { return Ok(environment) };
    let number = |number: Option<u32>| number.map(|number| number.to_string());
    let variables = [
        ("RANK", Some(placement.rank.to_string())),
        ("WORLD_SIZE", number(placement.world_size)),
        ("LOCAL_RANK", number(placement.local_rank)),
        ("GROUP_RANK", number(placement.node_rank)),
        ("MASTER_ADDR", placement.host.clone()),
        ("MASTER_PORT", placement.port.map(|port| port.to_string())),
    ];
    // An override replaces all other variables, except for the address where the ranks meet.
    let is_named = config.rendezvous.launcher != LauncherChoice::Auto;
    for (name, value) in variables {
        let Some(value) = value else { continue };
        if (is_named && !name.starts_with("MASTER_")) || !environment.contains_key(name) {
            environment.insert(name.into(), value);
        }
    }
    for (name, what) in [("MASTER_ADDR", "the host of rank 0"), ("MASTER_PORT", "a free port of it")] {
        if !environment.contains_key(name) {
            return Err(Error::Configuration(format!(
                "{placement}, and nothing says where the ranks meet; set {name}, for every rank, to {what}"
            )));
        }
    }
    Ok(environment)
}

/// Removes torchrun's variables from a single task that is to be several ranks: it is an ordinary process, which can start them.
fn leave_a_single_task(config: &Config, environment: &mut Environment) {
    let is = |name: &str, value: &str| environment.get(name).is_some_and(|text| text == value);
    let is_single = is("RANK", "0") && is("WORLD_SIZE", "1") && !environment.contains_key("RYZ_RENDEZVOUS");
    if is_single && config.job.world_size.is_some_and(|ranks| ranks.get() > 1) {
        environment.retain(|name, _| !TORCHRUN.contains(&name.as_str()));
    }
}

/// Replaces the address of torchrun's own store by one where rank 0 can listen: a port derived from torchrun's, and the loopback
/// address if all ranks are on this host.
fn leave_torchruns_port(environment: &mut Environment) {
    let is_store =
        environment.get("TORCHELASTIC_USE_AGENT_STORE").is_some_and(|is| is.eq_ignore_ascii_case("true"));
    let Some(port) = environment.get("MASTER_PORT").filter(|_| is_store) else { return };
    let run = environment.get("TORCHELASTIC_RUN_ID").map_or("", String::as_str);
    let port = port_of(&format!("{run}:{port}")).to_string();
    environment.insert("MASTER_PORT".into(), port);
    environment.insert("TORCHELASTIC_USE_AGENT_STORE".into(), "False".into());
    let is_one_host =
        environment.get("LOCAL_WORLD_SIZE").is_some_and(|here| environment.get("WORLD_SIZE") == Some(here));
    if let Some(host) = loopback(is_one_host) {
        environment.insert("MASTER_ADDR".into(), host);
    }
}

/// Detects the placement of this process by the launcher `choice`, or by any. `None` for an ordinary process, for a single
/// task, for a rank of `ryz launch`, and if torchrun's variables are complete.
///
/// # Errors
/// [`Error::Configuration`] when a variable is not a number, when launchers contradict each other, or when `choice` names one
/// that has set nothing.
pub fn detect(choice: LauncherChoice, environment: &Environment) -> Result<Option<Placement>> {
    if environment.contains_key("RYZ_RENDEZVOUS") {
        return Ok(None);
    }
    match choice {
        LauncherChoice::Torchrun => Ok(None),
        LauncherChoice::Auto => any(environment),
        named => {
            let (_, reader) = READERS.iter().find(|(launcher, _)| *launcher == named).expect("one for each");
            reader(environment)?.map(Some).ok_or_else(|| {
                Error::Configuration(format!(
                    "rendezvous.launcher is {}, and this process has none of its variables; start it there, or set auto",
                    named.name()
                ))
            })
        }
    }
}

fn any(environment: &Environment) -> Result<Option<Placement>> {
    // torchrun may run within any other launcher, once a node: its own variables take precedence.
    if environment.contains_key("TORCHELASTIC_RUN_ID") {
        return Ok(None);
    }
    let mut found = Vec::new();
    for (_, reader) in READERS {
        found.extend(reader(environment)?);
    }
    let has = |found: &[Placement], launcher| found.iter().any(|placement| placement.launcher == launcher);
    // mpirun starts its daemons with srun, whose task is not the rank.
    if has(&found, LauncherChoice::OpenMpi) {
        found.retain(|placement| placement.launcher != LauncherChoice::Slurm);
    }
    // A launcher of processes may run within a pod.
    if found.iter().any(|placement| !is_pod(placement.launcher)) {
        found.retain(|placement| !is_pod(placement.launcher));
    }
    // A single task is an ordinary process, whatever its launcher.
    if found.iter().any(|placement| placement.world_size == Some(1)) {
        found.retain(|placement| placement.world_size.is_some_and(|ranks| ranks > 1));
    }
    let by_hand = by_hand(environment)?;
    let all: Vec<&Placement> = by_hand.iter().chain(&found).collect();
    for (index, one) in all.iter().enumerate() {
        if let Some(other) = all[index + 1..].iter().find(|other| contradicts(one, other)) {
            return Err(Error::Configuration(format!(
                "two launchers contradict each other: {one}, {other}; set rendezvous.launcher (RYZ_RENDEZVOUS__LAUNCHER) to the \
                 one that started the ranks"
            )));
        }
    }
    // Variables set by hand are complete, or an error names the missing ones.
    if by_hand.is_some() {
        return Ok(None);
    }
    Ok(found.into_iter().reduce(|one, other| Placement {
        world_size: one.world_size.or(other.world_size),
        local_rank: one.local_rank.or(other.local_rank),
        node_rank: one.node_rank.or(other.node_rank),
        host: one.host.or(other.host),
        port: one.port.or(other.port),
        ..one
    }))
}

const fn is_pod(launcher: LauncherChoice) -> bool {
    matches!(
        launcher,
        LauncherChoice::LeaderWorkerSet | LauncherChoice::Kubeflow | LauncherChoice::IndexedJob
    )
}

fn contradicts(one: &Placement, other: &Placement) -> bool {
    let sizes = one.world_size.zip(other.world_size);
    one.rank != other.rank || sizes.is_some_and(|(one, other)| one != other)
}

/// Reads torchrun's variables, if torchrun did not set them.
fn by_hand(environment: &Environment) -> Result<Option<Placement>> {
    let Some(rank) = number(environment, "RANK")? else { return Ok(None) };
    Ok(Some(Placement { world_size: world_size(environment), ..placement(LauncherChoice::Torchrun, rank) }))
}

const fn placement(launcher: LauncherChoice, rank: u32) -> Placement {
    Placement { launcher, rank, world_size: None, local_rank: None, node_rank: None, host: None, port: None }
}

/// Returns the whole number that a variable contains.
pub(super) fn number(environment: &Environment, name: &str) -> Result<Option<u32>> {
    let Some(text) = environment.get(name) else { return Ok(None) };
    text.parse()
        .map(Some)
        .map_err(|_| Error::Configuration(format!("{name} is `{text}`, not a whole number")))
}

/// Returns the number of ranks that the user set. A wrong number is refused later, with the list of valid values.
fn world_size(environment: &Environment) -> Option<u32> {
    environment.get("WORLD_SIZE")?.parse().ok()
}

/// Returns the loopback address if all ranks are on one host, where they meet.
fn loopback(is_one_host: bool) -> Option<String> {
    is_one_host.then(|| "127.0.0.1".into())
}

/// Derives a port from the identity of a job, the same on every rank. Two jobs may get the same port: then one of them fails
/// and names it.
fn port_of(job: &str) -> u16 {
    // FNV-1a.
    let hash = job.bytes().fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    FIRST_PORT + (hash % PORTS) as u16
}

/// Reads the variables of Open MPI. `OMPI_COMM_WORLD_NODE_RANK` is not the rank of the node, but that of the process on it,
/// over all jobs.
fn open_mpi(environment: &Environment) -> Result<Option<Placement>> {
    let Some(rank) = number(environment, "OMPI_COMM_WORLD_RANK")? else { return Ok(None) };
    let world_size = number(environment, "OMPI_COMM_WORLD_SIZE")?;
    let on_host = number(environment, "OMPI_COMM_WORLD_LOCAL_SIZE")?;
    Ok(Some(Placement {
        world_size,
        local_rank: number(environment, "OMPI_COMM_WORLD_LOCAL_RANK")?,
        host: loopback(on_host.is_some() && on_host == world_size),
        port: environment.get("PMIX_NAMESPACE").map(|job| port_of(job)),
        ..placement(LauncherChoice::OpenMpi, rank)
    }))
}

/// Reads the variables of MPICH's Hydra and Intel MPI, or of `srun --mpi=pmi2`.
fn pmi(environment: &Environment) -> Result<Option<Placement>> {
    let Some(rank) = number(environment, "PMI_RANK")? else { return Ok(None) };
    let world_size = number(environment, "PMI_SIZE")?;
    let on_host = number(environment, "MPI_LOCALNRANKS")?;
    Ok(Some(Placement {
        world_size,
        local_rank: number(environment, "MPI_LOCALRANKID")?,
        host: loopback(on_host.is_some() && on_host == world_size),
        ..placement(LauncherChoice::Pmi, rank)
    }))
}

/// Reads the variables of any launcher with PMIx: `prterun`, or `srun --mpi=pmix`. The number of ranks is not among them.
fn pmix(environment: &Environment) -> Result<Option<Placement>> {
    let Some(rank) = number(environment, "PMIX_RANK")? else { return Ok(None) };
    Ok(Some(Placement {
        world_size: world_size(environment),
        port: environment.get("PMIX_NAMESPACE").map(|job| port_of(job)),
        ..placement(LauncherChoice::Pmix, rank)
    }))
}

/// Reads the variables of `srun`. A batch script has some of these too, but no step.
fn slurm(environment: &Environment) -> Result<Option<Placement>> {
    let (Some(step), Some(rank)) = (environment.get("SLURM_STEP_ID"), number(environment, "SLURM_PROCID")?)
    else {
        return Ok(None);
    };
    let either = |one, other| Ok::<_, Error>(number(environment, one)?.or(number(environment, other)?));
    let nodes = environment.get("SLURM_STEP_NODELIST");
    let host = match either("SLURM_STEP_NUM_NODES", "SLURM_NNODES")? {
        Some(1) => loopback(true),
        _ => nodes.map(|nodes| first_host(nodes)),
    };
    let job = environment.get("SLURM_JOB_ID");
    Ok(Some(Placement {
        world_size: either("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")?,
        local_rank: number(environment, "SLURM_LOCALID")?,
        node_rank: number(environment, "SLURM_NODEID")?,
        host,
        port: job.map(|job| port_of(&format!("{job}.{step}"))),
        ..placement(LauncherChoice::Slurm, rank)
    }))
}

/// Returns the first of Slurm's list of hosts: `n01` of `n[01-04,7],m1`.
fn first_host(list: &str) -> String {
    let (mut host, mut in_brackets, mut is_past) = (String::new(), false, false);
    for c in list.chars() {
        match c {
            '[' => (in_brackets, is_past) = (true, false),
            ']' => in_brackets = false,
            ',' if !in_brackets => break,
            // After the first of a range or list.
            '-' | ',' if in_brackets => is_past = true,
            _ if in_brackets && is_past => {}
            c => host.push(c),
        }
    }
    host
}

/// Reads the variables of a LeaderWorkerSet, each pod of which is a rank.
fn leader_worker_set(environment: &Environment) -> Result<Option<Placement>> {
    let Some(rank) = number(environment, "LWS_WORKER_INDEX")? else { return Ok(None) };
    Ok(Some(Placement {
        world_size: number(environment, "LWS_GROUP_SIZE")?,
        host: environment.get("LWS_LEADER_ADDRESS").cloned(),
        ..pod(LauncherChoice::LeaderWorkerSet, rank)
    }))
}

/// Reads the variables of Kubeflow's trainer, each pod of which is a rank, unless it is to run several.
fn kubeflow(environment: &Environment) -> Result<Option<Placement>> {
    let Some(rank) = number(environment, "PET_NODE_RANK")? else { return Ok(None) };
    if let Some(on_each) = environment.get("PET_NPROC_PER_NODE").filter(|on_each| *on_each != "1") {
        // Ranks that have been numbered by another launcher need no more.
        if environment.contains_key("RANK") {
            return Ok(None);
        }
        return Err(Error::Configuration(format!(
            "PET_NPROC_PER_NODE is `{on_each}`: this pod is to run several ranks; start them with `ryz launch --nnodes \
             $PET_NNODES --node-rank $PET_NODE_RANK --rendezvous $PET_MASTER_ADDR:$PET_MASTER_PORT -- PROGRAM`, or set 1"
        )));
    }
    let port = number(environment, "PET_MASTER_PORT")?.and_then(|port| u16::try_from(port).ok());
    let pod = pod(LauncherChoice::Kubeflow, rank);
    Ok(Some(Placement {
        world_size: number(environment, "PET_NNODES")?,
        host: environment.get("PET_MASTER_ADDR").cloned(),
        port: port.or(pod.port),
        ..pod
    }))
}

/// Reads the variables of an indexed Job. Its pod is a rank only if a variable says that there are others: many such Jobs are
/// lists of work.
fn indexed_job(environment: &Environment) -> Result<Option<Placement>> {
    if !environment.contains_key("MASTER_ADDR") {
        return Ok(None);
    }
    let Some(rank) = number(environment, "JOB_COMPLETION_INDEX")? else { return Ok(None) };
    Ok(Some(Placement { world_size: world_size(environment), ..pod(LauncherChoice::IndexedJob, rank) }))
}

/// Returns the placement of a pod with one rank. It counts as a separate host.
fn pod(launcher: LauncherChoice, rank: u32) -> Placement {
    let (local_rank, node_rank) = (Some(0), Some(rank));
    Placement { local_rank, node_rank, port: Some(POD_PORT), ..placement(launcher, rank) }
}

#[cfg(test)]
mod tests;
