//! Settings of NCCL that suit a machine and a model. Pure, from the facts that the doctor probes.

use std::collections::BTreeSet;

use ryzanstein_config::nccl::NcclVariable;
use ryzanstein_config::{Config, NcclProfile, ValueError};
use ryzanstein_process_group::paths::gpu::{PEER_RANKS, peer_most};
use ryzanstein_process_group::units;

use crate::doctor::{DriverFacts, Hardware, InfinibandPort, Interface};
use ryzanstein_orchestrator::plural;

/// Upper bound in bytes of a message of inference: kilobytes to a few megabytes.
const SMALL: u64 = 4 << 20;
/// Size in bytes from which on more thread blocks move a message faster.
const LARGE: u64 = 64 << 20;
/// Size in bytes up to which the number of steps bounds an all-reduce between nodes, not the bandwidth.
const BOUND_BY_STEPS: u64 = 256 << 10;

/// The value of `NCCL_ALGO` for trees: all-reduces take them, operations without a tree take rings.
pub(super) const TREE: &str = "Ring;allreduce:Tree";

/// The situation that the settings are for.
#[derive(Clone, Copy, Debug)]
pub struct Situation<'a> {
    /// This machine; all nodes are taken to be alike.
    pub hardware: &'a Hardware,
    /// Number of nodes of the job.
    pub nodes: u32,
    /// Bytes of the all-reduce that counts, if known.
    pub message: Option<u64>,
}

/// Prefix of the keys of NCCL's own variables.
pub(super) const ENV: &str = "nccl.env.";

/// A setting that should have another value: `nccl.profile`, or a variable of `nccl.env`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Proposal {
    /// The dotted key.
    pub key: &'static str,
    /// The value.
    pub value: String,
    /// The reason for the value.
    pub reason: String,
}

impl Proposal {
    /// Returns true if it is a variable of `nccl.env`.
    pub fn is_variable(&self) -> bool {
        self.key.starts_with(ENV)
    }

    /// Returns the configuration with this setting.
    ///
    /// # Errors
    /// [`ValueError`] if the value cannot be written as a setting.
    pub fn apply(&self, mut config: Config) -> Result<Config, ValueError> {
        match self.key.strip_prefix(ENV) {
            Some(name) => config.nccl.env.insert(name, &self.value)?,
            None => config.nccl.profile = self.value.parse()?,
        }
        Ok(config)
    }
}

impl Situation<'_> {
    fn gpus(&self) -> usize {
        self.hardware.driver.as_ref().map_or(0, |driver| driver.gpus.len())
    }

    fn ranks(&self) -> usize {
        self.gpus() * self.nodes as usize
    }

    /// Returns the ports of InfiniBand and RoCE that work.
    fn ports(&self) -> Vec<&InfinibandPort> {
        let is_active = |port: &&InfinibandPort| port.state.is_empty() || port.state == "ACTIVE";
        self.hardware.network.infiniband.iter().filter(is_active).collect()
    }
}

/// Returns true if our own kernels, and not NCCL, carry the all-reduce that counts.
pub fn own_kernels_carry(situation: &Situation<'_>, config: &Config) -> bool {
    let ranks = config.job.world_size.map_or(situation.gpus(), |ranks| ranks.get() as usize);
    situation.nodes == 1
        && config.process_group.peer_memory
        && situation.hardware.driver.as_ref().is_ok_and(DriverFacts::is_all_nvlink)
        && PEER_RANKS.contains(&ranks)
        && situation.message.is_some_and(|bytes| peer_most(ranks).is_none_or(|most| bytes as usize <= most))
}

/// Proposes settings. Settings of the configuration are left unchanged.
pub fn propose(situation: &Situation<'_>, config: &Config) -> Vec<Proposal> {
    let nccl = &config.nccl;
    let is_free = |name: &str| nccl.env.get(name).is_none();
    let has_ctas = !is_free("NCCL_MIN_CTAS") || !is_free("NCCL_MAX_CTAS");
    let rules = [
        profile(situation).filter(|_| {
            nccl.profile == NcclProfile::None && !has_ctas && !own_kernels_carry(situation, config)
        }),
        algorithm(situation).filter(|_| is_free("NCCL_ALGO")),
        cross_nic(situation).filter(|_| is_free("NCCL_CROSS_NIC")),
        gid_index(situation).filter(|_| is_free("NCCL_IB_GID_INDEX")),
        interface(situation).filter(|_| is_free("NCCL_SOCKET_IFNAME")),
    ];
    rules.into_iter().flatten().collect()
}

fn profile(situation: &Situation<'_>) -> Option<Proposal> {
    let bytes = situation.message.filter(|_| situation.ranks() > 1)?;
    let shown = units::bytes(bytes as f64);
    let of = |profile: NcclProfile, reason: String| Proposal {
        key: "nccl.profile",
        value: profile.name().into(),
        reason,
    };
    if bytes <= SMALL {
        Some(of(
            NcclProfile::Inference,
            format!(
                "messages of {shown} need few thread blocks; more blocks would take multiprocessors from the computation"
            ),
        ))
    } else if bytes >= LARGE {
        Some(of(
            NcclProfile::Bandwidth,
            format!("messages of {shown} are bound by bandwidth, and more thread blocks move more"),
        ))
    } else {
        None
    }
}

fn algorithm(situation: &Situation<'_>) -> Option<Proposal> {
    let bytes = situation.message.filter(|bytes| situation.nodes > 1 && *bytes <= BOUND_BY_STEPS)?;
    let ranks = situation.ranks();
    let steps = 2 * ranks.checked_next_power_of_two()?.ilog2();
    (ranks > 2).then(|| Proposal {
        key: "nccl.env.NCCL_ALGO",
        value: TREE.into(),
        reason: format!(
            "an all-reduce of {} among {ranks} ranks on {} is bound by its steps: some {steps} in a tree, {} in a ring",
            units::bytes(bytes as f64),
            plural(situation.nodes as usize, "node"),
            2 * (ranks - 1)
        ),
    })
}

fn cross_nic(situation: &Situation<'_>) -> Option<Proposal> {
    let ports = situation.ports();
    let adapters: BTreeSet<&str> =
        ports.iter().map(|port| port.name.split(':').next().unwrap_or_default()).collect();
    (situation.nodes > 1 && adapters.len() > 1 && adapters.len() == situation.gpus()).then(|| Proposal {
        key: "nccl.env.NCCL_CROSS_NIC",
        value: "0".into(),
        reason: format!(
            "{} adapters for {} GPUs suggest rails: adapters of the same number share a switch, and every other route crosses \
             one more. Where all adapters share one switch, 1 is better",
            adapters.len(),
            situation.gpus()
        ),
    })
}

fn gid_index(situation: &Situation<'_>) -> Option<Proposal> {
    let ports = situation.ports();
    let roce: Vec<&&InfinibandPort> = ports.iter().filter(|port| port.link_layer == "Ethernet").collect();
    let index = roce.first().filter(|_| situation.nodes > 1)?.roce_v2_gid?;
    roce.iter().all(|port| port.roce_v2_gid == Some(index)).then(|| Proposal {
        key: "nccl.env.NCCL_IB_GID_INDEX",
        value: index.to_string(),
        reason: format!(
            "entry {index} is RoCE v2 with an IPv4 address on every port; NCCL before 2.21 takes entry 0, which \
             routers do not forward"
        ),
    })
}

fn interface(situation: &Situation<'_>) -> Option<Proposal> {
    if situation.nodes < 2 || !situation.ports().is_empty() {
        return None;
    }
    let usable =
        |one: &&Interface| !one.loopback && one.pci.is_some() && one.state == "up" && one.speed.is_some();
    let fastest = situation.hardware.network.interfaces.iter().filter(usable).max_by_key(|one| one.speed)?;
    Some(Proposal {
        key: "nccl.env.NCCL_SOCKET_IFNAME",
        value: format!("={}", fastest.name),
        reason: format!(
            "without InfiniBand, NCCL uses every interface that it finds; the fastest that is up is {} with {}. It must have this \
             name on every node",
            fastest.name,
            fastest.rate()
        ),
    })
}

/// Returns the variables that differ between two plans: name, value before and value after.
pub fn changes(
    before: &[NcclVariable],
    after: &[NcclVariable],
) -> Vec<(String, Option<String>, Option<String>)> {
    let names: BTreeSet<&str> = before.iter().chain(after).map(|variable| variable.name.as_str()).collect();
    let value = |plan: &[NcclVariable], name: &str| {
        plan.iter().find(|variable| variable.name == name).map(|variable| variable.value.clone())
    };
    let both = names.into_iter().map(|name| (name.to_owned(), value(before, name), value(after, name)));
    both.filter(|(_, before, after)| before != after).collect()
}

#[cfg(test)]
mod tests {
    use ryzanstein_config::nccl::{UserVariable, plan};

    use super::*;
    use clap::ValueEnum as _;

    use crate::topo::Preset;

    const MESSAGE: Option<u64> = Some(16 << 10);

    fn keys(hardware: &Hardware, nodes: u32, message: Option<u64>) -> Vec<(&'static str, String)> {
        let proposals = propose(&Situation { hardware, nodes, message }, &Config::default());
        assert!(proposals.iter().all(|proposal| !proposal.reason.is_empty()));
        proposals.into_iter().map(|proposal| (proposal.key, proposal.value)).collect()
    }

    fn pair(key: &'static str, value: &str) -> (&'static str, String) {
        (key, value.to_owned())
    }

    #[test]
    fn one_node_needs_the_profile_of_its_messages_alone() {
        let profile = |name| vec![pair("nccl.profile", name)];
        for preset in Preset::value_variants() {
            let hardware = preset.hardware();
            let is_own = hardware.driver.as_ref().is_ok_and(DriverFacts::is_all_nvlink);
            let small = if is_own { Vec::new() } else { profile("inference") };
            assert_eq!(keys(&hardware, 1, MESSAGE), small, "{preset:?}");
            assert_eq!(keys(&hardware, 1, Some(256 << 20)), profile("bandwidth"));
            assert_eq!(keys(&hardware, 1, Some(16 << 20)), [], "neither small nor large");
            assert_eq!(keys(&hardware, 1, None), [], "nothing is known of the messages");
        }
    }

    #[test]
    fn nothing_is_proposed_for_calls_that_our_own_kernels_carry() {
        let hardware = Preset::DgxH100.hardware();
        let situation = |nodes, message| Situation { hardware: &hardware, nodes, message };
        let mut config = Config::default();
        assert!(own_kernels_carry(&situation(1, MESSAGE), &config));
        assert!(
            !own_kernels_carry(&situation(2, MESSAGE), &config)
                && !own_kernels_carry(&situation(1, None), &config)
        );
        let large = situation(1, Some(256 << 20));
        assert!(!own_kernels_carry(&large, &config), "eight ranks: NCCL carries it");
        config.job.world_size = ryzanstein_config::WorldSize::new(2).ok();
        assert!(own_kernels_carry(&large, &config), "two ranks: any length");
        config.process_group.peer_memory = false;
        assert!(!own_kernels_carry(&large, &config));
        let split = Preset::Hybrid.hardware();
        let split = Situation { hardware: &split, nodes: 1, message: MESSAGE };
        assert!(!own_kernels_carry(&split, &Config::default()), "NVLink joins pairs only");
    }

    #[test]
    fn several_nodes_need_what_their_network_has() {
        assert_eq!(
            keys(&Preset::DgxH100.hardware(), 2, MESSAGE),
            [
                pair("nccl.profile", "inference"),
                pair("nccl.env.NCCL_ALGO", TREE),
                pair("nccl.env.NCCL_CROSS_NIC", "0")
            ]
        );
        assert_eq!(
            keys(&Preset::PcieOnly.hardware(), 2, None),
            [pair("nccl.env.NCCL_SOCKET_IFNAME", "=ens1np0")],
            "Ethernet alone"
        );
        assert_eq!(keys(&Preset::Hybrid.hardware(), 2, None), [], "one adapter for four GPUs is no rail");
    }

    #[test]
    fn roce_needs_its_entry_of_the_table_where_all_ports_agree() {
        let mut hardware = Preset::Hybrid.hardware();
        let port = &mut hardware.network.infiniband[0];
        (port.link_layer, port.roce_v2_gid) = ("Ethernet".into(), Some(3));
        assert_eq!(keys(&hardware, 2, None), [pair("nccl.env.NCCL_IB_GID_INDEX", "3")]);
        let other = InfinibandPort {
            name: "mlx5_1:1".into(),
            roce_v2_gid: Some(5),
            ..hardware.network.infiniband[0].clone()
        };
        hardware.network.infiniband.push(other);
        assert_eq!(keys(&hardware, 2, None), []);
        hardware.network.infiniband[1].state = "DOWN".into();
        assert_eq!(
            keys(&hardware, 2, None),
            [pair("nccl.env.NCCL_IB_GID_INDEX", "3")],
            "a port that is down has no say"
        );
    }

    #[test]
    fn what_the_user_has_set_stays_and_a_variable_of_the_users_shows_as_no_change() {
        let hardware = Preset::DgxH100.hardware();
        let situation = Situation { hardware: &hardware, nodes: 2, message: MESSAGE };
        let mut config = Config::default();
        config.nccl.profile = NcclProfile::Debug;
        config.nccl.env.insert("NCCL_CROSS_NIC", "1").expect("a variable");
        let left: Vec<&str> = propose(&situation, &config).iter().map(|proposal| proposal.key).collect();
        assert_eq!(left, ["nccl.env.NCCL_ALGO"]);

        let own = [UserVariable { name: "NCCL_MAX_CTAS".into(), value: "8".into(), file: None }];
        let mut after = Config::default();
        after.nccl.profile = NcclProfile::Inference;
        let changed = changes(&plan(&Config::default(), &own), &plan(&after, &own));
        assert_eq!(changed, [("NCCL_DEBUG".into(), None, Some("WARN".into()))]);
    }
}
