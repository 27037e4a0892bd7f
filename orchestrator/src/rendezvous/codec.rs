//! Converts between the messages on the wire and the types of this program.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use prost::Message;
use ryzanstein_config::BackendChoice;
use ryzanstein_process_group as pg;
use ryzanstein_process_group::{
    BackendKind, BackendSelection, Candidate, Capability, ComponentVersion, Cpus, Epoch, Exclusive,
    LocalRank, Member, Rank, Roster,
};

use super::core::{Join, Joined, Participant, Refusal, Time};
use crate::control as wire;

/// Maximum timeout accepted from the wire; longer ones are cut to it.
const LONGEST_WAIT: Duration = Duration::from_secs(365 * 24 * 60 * 60);
/// Maximum length of a list of CPUs accepted from the wire, in bytes.
const LONGEST_CPU_LIST: usize = 8192;
/// Maximum number of missing ranks that one refusal names.
const MOST_NAMED: usize = 1024;

pub(crate) fn deadline(now: Time, timeout_ms: u64) -> Time {
    now + Duration::from_millis(timeout_ms).min(LONGEST_WAIT)
}

pub(super) fn milliseconds(wait: Duration) -> u64 {
    u64::try_from(wait.as_millis()).unwrap_or(u64::MAX)
}

fn kind(name: &str) -> Option<BackendKind> {
    BackendKind::BY_PREFERENCE.into_iter().find(|kind| kind.name() == name)
}

pub(super) fn join_request(
    participant: Participant,
    epoch: Option<Epoch>,
    world_size: u32,
    wait: Duration,
) -> wire::JoinRequest {
    let Candidate { host, pid, cpus, data_address, wanted, capabilities } = participant.candidate;
    wire::JoinRequest {
        epoch: epoch.map_or(0, |epoch| epoch.0),
        world_size,
        rank: participant.rank.map(|rank| rank.0),
        local_rank: participant.local_rank.map(|rank| rank.0),
        node_rank: participant.node_rank,
        version: crate::VERSION.into(),
        host,
        pid,
        cpus: cpus.count,
        cpu_list: cpus.list,
        data_address: data_address.map(|address| address.to_string()),
        wanted: wanted.to_string(),
        capabilities: capabilities.into_iter().map(encode_capability).collect(),
        timeout_ms: milliseconds(wait),
    }
}

pub(crate) fn join(request: wire::JoinRequest, now: Time) -> Result<Join, Refusal> {
    let invalid =
        |what: &str, text: &str| Refusal::Invalid(format!("the {what} of a joining rank is `{text}`"));
    if request.host.len() > 255 {
        return Err(Refusal::Invalid("the host name of a joining rank has more than 255 bytes".into()));
    }
    if request.cpu_list.len() > LONGEST_CPU_LIST {
        let why = format!("the list of CPUs of a joining rank has more than {LONGEST_CPU_LIST} bytes");
        return Err(Refusal::Invalid(why));
    }
    let data_address = request
        .data_address
        .map(|text| text.parse::<SocketAddr>().map_err(|_| invalid("data address", &text)))
        .transpose()?;
    let wanted: BackendChoice = request.wanted.parse().map_err(|_| invalid("backend", &request.wanted))?;
    // A backend that only another version has cannot be selected by this one.
    let capabilities = request.capabilities.into_iter().filter_map(decode_capability).collect();
    Ok(Join {
        epoch: (request.epoch != 0).then_some(Epoch(request.epoch)),
        world_size: request.world_size,
        version: request.version,
        deadline: deadline(now, request.timeout_ms),
        participant: Participant {
            rank: request.rank.map(Rank),
            local_rank: request.local_rank.map(LocalRank),
            node_rank: request.node_rank,
            candidate: Candidate {
                host: request.host,
                pid: request.pid,
                cpus: Cpus { count: request.cpus, list: request.cpu_list },
                data_address,
                wanted,
                capabilities,
            },
        },
    })
}

fn encode_capability(capability: Capability) -> wire::Capability {
    let Capability { backend, obstacle, exclusive, version, summary: _ } = capability;
    wire::Capability {
        backend: backend.name().into(),
        obstacle,
        exclusive: exclusive.map(|Exclusive { id, name, rule }| wire::Exclusive { id, name, rule }),
        version: version.map(|ComponentVersion { component, version, rule }| wire::ComponentVersion {
            component,
            version,
            rule,
        }),
    }
}

fn decode_capability(capability: wire::Capability) -> Option<Capability> {
    let wire::Capability { backend, obstacle, exclusive, version } = capability;
    Some(Capability {
        backend: kind(&backend)?,
        obstacle,
        summary: None,
        exclusive: exclusive.map(|wire::Exclusive { id, name, rule }| Exclusive { id, name, rule }),
        version: version.map(|wire::ComponentVersion { component, version, rule }| ComponentVersion {
            component,
            version,
            rule,
        }),
    })
}

/// Numbers each distinct text in order of first appearance.
#[derive(Default)]
struct Names {
    number: HashMap<String, u32>,
    names: Vec<String>,
}

impl Names {
    fn number(&mut self, name: String) -> u32 {
        let next = self.names.len() as u32;
        *self.number.entry(name).or_insert_with_key(|name| {
            self.names.push(name.clone());
            next
        })
    }
}

pub(crate) fn encode_roster(joined: &Joined) -> bytes::Bytes {
    let mut roster = wire::Roster {
        epoch: joined.roster.epoch.0,
        backend: joined.selection.backend.name().into(),
        reason: joined.selection.reason.clone(),
        ..wire::Roster::default()
    };
    let (mut hosts, mut addresses, mut cpu_lists) = (Names::default(), Names::default(), Names::default());
    for member in &joined.roster.members {
        roster.host.push(hosts.number(member.host.clone()));
        roster.pid.push(member.pid);
        roster.cpus.push(member.cpus.count);
        roster.cpu_list.push(cpu_lists.number(member.cpus.list.clone()));
        roster.local_rank.push(member.local_rank.0);
        roster.node_rank.push(member.node_rank);
        roster.address.push(member.data_address.map_or(0, |a| addresses.number(a.ip().to_string()) + 1));
        roster.port.push(member.data_address.map_or(0, |a| u32::from(a.port())));
    }
    (roster.hosts, roster.addresses, roster.cpu_lists) = (hosts.names, addresses.names, cpu_lists.names);
    roster.encode_to_vec().into()
}

/// The reason why a roster from the rendezvous cannot be used. The fault is the sender's.
#[derive(Clone, PartialEq, Debug, thiserror::Error)]
pub(crate) enum RosterError {
    /// The bytes are not a message of this kind.
    #[error("the roster received cannot be decoded: {0}")]
    Decode(#[from] prost::DecodeError),
    /// The columns have different lengths.
    #[error("the roster received is malformed: its columns differ in length")]
    UnevenColumns,
    /// A column contains an invalid value.
    #[error("the roster received is malformed: rank {rank} has no valid {column}")]
    BadEntry {
        /// The rank of the entry.
        rank: usize,
        /// The column of the entry.
        column: &'static str,
    },
    /// The backend is unknown to this version.
    #[error("the roster received names the unknown backend `{0}`")]
    UnknownBackend(String),
}

pub(crate) fn decode_roster(bytes: &[u8]) -> Result<Joined, RosterError> {
    let roster = wire::Roster::decode(bytes)?;
    let ranks = roster.host.len();
    let columns = [
        &roster.pid,
        &roster.cpus,
        &roster.cpu_list,
        &roster.local_rank,
        &roster.node_rank,
        &roster.address,
        &roster.port,
    ];
    if columns.iter().any(|column| column.len() != ranks) {
        return Err(RosterError::UnevenColumns);
    }
    let mut members = Vec::with_capacity(ranks);
    for i in 0..ranks {
        let bad = |column| RosterError::BadEntry { rank: i, column };
        let data_address = match roster.address[i].checked_sub(1) {
            None => None,
            Some(index) => {
                let ip: IpAddr = roster
                    .addresses
                    .get(index as usize)
                    .and_then(|text| text.parse().ok())
                    .ok_or_else(|| bad("address"))?;
                Some(SocketAddr::new(ip, u16::try_from(roster.port[i]).map_err(|_| bad("port"))?))
            }
        };
        members.push(Member {
            rank: Rank(i as u32),
            local_rank: LocalRank(roster.local_rank[i]),
            node_rank: roster.node_rank[i],
            host: roster.hosts.get(roster.host[i] as usize).cloned().ok_or_else(|| bad("host"))?,
            pid: roster.pid[i],
            cpus: Cpus {
                count: roster.cpus[i],
                list: roster
                    .cpu_lists
                    .get(roster.cpu_list[i] as usize)
                    .cloned()
                    .ok_or_else(|| bad("list of CPUs"))?,
            },
            data_address,
        });
    }
    let backend = kind(&roster.backend).ok_or(RosterError::UnknownBackend(roster.backend))?;
    Ok(Joined {
        roster: Roster { epoch: Epoch(roster.epoch), members },
        selection: BackendSelection { backend, reason: roster.reason },
    })
}

impl From<Refusal> for wire::Refusal {
    fn from(refusal: Refusal) -> Self {
        let of = |kind: wire::refusal::Kind, message| Self { kind: kind.into(), message, ..Self::default() };
        match refusal {
            Refusal::Refused(why) | Refusal::Epoch(why) => of(wire::refusal::Kind::Refused, why),
            Refusal::Invalid(why) => of(wire::refusal::Kind::Invalid, why),
            Refusal::Configuration(why) => of(wire::refusal::Kind::Configuration, why),
            Refusal::Timeout { what, waited, mut missing } => {
                missing.truncate(MOST_NAMED);
                Self {
                    waited_ms: milliseconds(waited),
                    missing: missing.into_iter().map(|rank| rank.0).collect(),
                    ..of(wire::refusal::Kind::Timeout, what)
                }
            }
        }
    }
}

pub(crate) fn error(refusal: wire::Refusal) -> pg::Error {
    match refusal.kind() {
        wire::refusal::Kind::Refused => pg::Error::Rendezvous(refusal.message),
        wire::refusal::Kind::Invalid => pg::Error::Invalid(refusal.message),
        wire::refusal::Kind::Configuration => pg::Error::Configuration(refusal.message),
        wire::refusal::Kind::Timeout => pg::Error::Timeout {
            what: refusal.message,
            waited: Duration::from_millis(refusal.waited_ms),
            missing: refusal.missing.into_iter().map(Rank).collect(),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_roster_survives_the_wire_at_a_dozen_bytes_a_rank() {
        let members: Vec<Member> = (0..10_000)
            .map(|i| Member {
                rank: Rank(i),
                local_rank: LocalRank(i % 8),
                node_rank: i / 8,
                host: format!("node{}", i / 8),
                pid: 4_000_000 - i,
                cpus: Cpus { count: 2, list: format!("{}-{}", i % 8 * 2, i % 8 * 2 + 1) },
                data_address: (i % 5 != 0)
                    .then(|| SocketAddr::from(([10, 0, (i / 2048) as u8, (i / 8) as u8], 40_000))),
            })
            .collect();
        let joined = Joined {
            roster: Roster { epoch: Epoch(3), members },
            selection: BackendSelection { backend: BackendKind::Tcp, reason: "asked for".into() },
        };
        let bytes = encode_roster(&joined);
        assert!(bytes.len() < 200_000, "{} bytes", bytes.len());
        assert_eq!(decode_roster(&bytes), Ok(joined));
        assert!(matches!(decode_roster(&bytes[..bytes.len() - 9]), Err(RosterError::Decode(_))));
    }

    #[test]
    fn fuzzing_starts_from_a_whole_roster() {
        let seed = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/fuzz/seeds/roster/two_ranks");
        let members = decode_roster(&std::fs::read(seed).unwrap()).unwrap().roster.members;
        assert_eq!(members.iter().map(|member| member.cpus.list.as_str()).collect::<Vec<_>>(), ["0-1"; 2]);
    }
}
