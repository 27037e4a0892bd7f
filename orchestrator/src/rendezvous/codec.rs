//! Converts between the messages on the wire and the types of this program.

use std::time::Duration;

use bytes::Bytes;
use ryzanstein_process_group as pg;
use ryzanstein_process_group::{Epoch, Rank};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::core::{Join, Joined, Participant, Refusal, Time};
use crate::VERSION;
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

/// The depth of the deepest value on the wire, and some more.
const DEEPEST: usize = 16;

pub(crate) fn encode(value: &impl Serialize) -> Bytes {
    rmp_serde::to_vec(value).expect("these types have a form in MessagePack").into()
}

/// Decodes a value that fills the bytes.
fn decode<T: DeserializeOwned>(mut bytes: &[u8]) -> Result<T, String> {
    let mut decoder = rmp_serde::Deserializer::new(&mut bytes);
    decoder.set_max_depth(DEEPEST);
    let value = T::deserialize(&mut decoder).map_err(|error| error.to_string())?;
    if bytes.is_empty() { Ok(value) } else { Err(format!("{} bytes follow the value", bytes.len())) }
}

pub(super) fn join_request(
    participant: &Participant,
    epoch: Option<Epoch>,
    world_size: u32,
    wait: Duration,
) -> wire::JoinRequest {
    wire::JoinRequest {
        epoch: epoch.map_or(0, |epoch| epoch.0),
        world_size,
        version: VERSION.into(),
        timeout_ms: milliseconds(wait),
        participant: encode(participant),
    }
}

pub(crate) fn join(request: wire::JoinRequest, now: Time) -> Result<Join, Refusal> {
    let wire::JoinRequest { epoch, world_size, version, timeout_ms, participant } = request;
    let participant: Participant = decode(&participant).map_err(|error| {
        let remedy = if version == VERSION { "" } else { "; install the same version on every node" };
        Refusal::Configuration(format!(
            "the rendezvous, which runs {VERSION}, cannot decode the request of a rank that runs {version} ({error}){remedy}"
        ))
    })?;
    if participant.candidate.host.len() > 255 {
        return Err(Refusal::Invalid("the host name of a joining rank has more than 255 bytes".into()));
    }
    if participant.candidate.cpus.list.len() > LONGEST_CPU_LIST {
        let why = format!("the list of CPUs of a joining rank has more than {LONGEST_CPU_LIST} bytes");
        return Err(Refusal::Invalid(why));
    }
    let epoch = (epoch != 0).then_some(Epoch(epoch));
    Ok(Join { epoch, world_size, version, deadline: deadline(now, timeout_ms), participant })
}

/// Decodes a roster. The error is a whole sentence; the fault is the sender's.
pub(crate) fn decode_roster(bytes: &[u8]) -> Result<Joined, String> {
    let joined: Joined =
        decode(bytes).map_err(|error| format!("the roster received cannot be decoded: {error}"))?;
    match joined.roster.members.iter().zip(0..).find(|(member, index)| member.rank != Rank(*index)) {
        Some((member, index)) => {
            Err(format!("the roster received is malformed: member {index} has rank {}", member.rank))
        }
        None => Ok(joined),
    }
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
    use ryzanstein_config::BackendChoice;
    use ryzanstein_process_group::{
        BackendKind, BackendSelection, Candidate, Capability, ComponentVersion, Cpus, Exclusive, LocalRank,
        Member, Roster,
    };

    use super::*;

    fn joined(ranks: u32) -> Joined {
        let members = (0..ranks).map(|i| Member {
            rank: Rank(i),
            local_rank: LocalRank(i % 8),
            node_rank: i / 8,
            host: format!("node{}", i / 8),
            pid: 4_000_000 - i,
            cpus: Cpus { count: 2, list: format!("{}-{}", i % 8 * 2, i % 8 * 2 + 1) },
            data_address: (i % 5 != 0).then(|| ([10, 0, (i / 2048) as u8, (i / 8) as u8], 40_000).into()),
        });
        Joined {
            roster: Roster { epoch: Epoch(3), members: members.collect() },
            selection: BackendSelection { backend: BackendKind::Tcp, reason: "asked for".into() },
        }
    }

    #[test]
    fn what_a_rank_says_of_itself_survives_the_wire_but_for_the_summary() {
        let text = |text: &str| text.to_owned();
        let exclusive = Exclusive { id: text("GPU-1"), name: text("GPU 1"), rule: text("one rank each") };
        let version =
            ComponentVersion { component: text("NCCL"), version: text("2.28"), rule: text("one for all") };
        let usable = Capability {
            exclusive: Some(exclusive),
            version: Some(version),
            ..Capability::usable(BackendKind::Nccl)
        };
        let candidate = Candidate {
            host: text("node1"),
            pid: 17,
            cpus: Cpus { count: 2, list: text("0-1") },
            data_address: Some(([10, 0, 0, 1], 40_000).into()),
            wanted: BackendChoice::Auto,
            capabilities: vec![usable, Capability::unusable(BackendKind::Tcp, "no port", "no port is free")],
        };
        let participant = Participant {
            rank: Some(Rank(3)),
            local_rank: None,
            node_rank: Some(1),
            candidate: candidate.clone(),
        };
        let request = join_request(&participant, Some(Epoch(2)), 8, Duration::from_secs(5));
        let join = join(request, Duration::from_secs(1)).unwrap();
        assert_eq!((join.epoch, join.world_size, join.deadline), (Some(Epoch(2)), 8, Duration::from_secs(6)));
        let Participant { rank, local_rank, node_rank, candidate: there } = join.participant;
        assert_eq!((rank, local_rank, node_rank), (Some(Rank(3)), None, Some(1)));
        let mut here = candidate;
        here.capabilities[1].summary = None;
        assert_eq!(there, here);
    }

    #[test]
    fn a_roster_survives_the_wire_and_a_damaged_one_is_refused() {
        let joined = joined(10_000);
        let bytes = encode(&joined);
        assert!(bytes.len() < 450_000, "{} bytes", bytes.len());
        assert_eq!(decode_roster(&bytes), Ok(joined));
        for damaged in [&bytes[..bytes.len() - 20], &[&bytes[..], &[0]].concat()] {
            let why = decode_roster(damaged).unwrap_err();
            assert!(why.starts_with("the roster received cannot be decoded"), "{why}");
        }
    }

    #[test]
    fn a_member_in_the_place_of_another_is_refused() {
        let mut joined = joined(3);
        joined.roster.members.swap(1, 2);
        let why = "the roster received is malformed: member 1 has rank 2";
        assert_eq!(decode_roster(&encode(&joined)), Err(why.into()));
    }

    #[test]
    fn a_request_that_cannot_be_decoded_is_refused_with_both_versions() {
        // Lists in lists, deeper than any value.
        let participant = vec![0x91; 1000].into();
        for (version, has_remedy) in [("9.9", true), (VERSION, false)] {
            let (version, participant) = (version.to_owned(), Bytes::clone(&participant));
            let request = wire::JoinRequest { version, participant, ..wire::JoinRequest::default() };
            let Err(Refusal::Configuration(why)) = join(request, Duration::ZERO) else {
                panic!("it is refused")
            };
            assert!(why.contains(&format!("runs {VERSION}, cannot decode")), "{why}");
            assert_eq!(
                why.contains("a rank that runs 9.9 ") && why.contains("same version"),
                has_remedy,
                "{why}"
            );
        }
    }

    #[test]
    fn fuzzing_starts_from_a_whole_roster() {
        let seed = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/fuzz/seeds/roster/two_ranks");
        let members = decode_roster(&std::fs::read(seed).unwrap()).unwrap().roster.members;
        assert_eq!(members.iter().map(|member| member.cpus.list.as_str()).collect::<Vec<_>>(), ["0-1"; 2]);
    }
}
