//! The decoders of this crate for the fuzz targets. Not a public API: it may change at any time.

use std::time::Duration;

use prost::Message;
use ryzanstein_process_group::{Epoch, Rank};

use crate::control as wire;
use crate::rendezvous::codec;
use crate::rendezvous::core::{Core, Event, Report, RequestId};

/// Handles requests to a rendezvous, one after the other, each preceded by a byte for its kind and one for its length. Whatever
/// their content, no request is answered twice, and none is left when all deadlines have passed.
pub fn requests(mut bytes: &[u8]) {
    const RANKS: u32 = 2;
    let mut core = Core::new(RANKS, crate::VERSION, Epoch(1));
    let mut answered = Vec::new();
    let (mut now, mut asked) = (Duration::ZERO, 0);
    while let [kind, length, rest @ ..] = bytes {
        let (message, rest) = rest.split_at(rest.len().min(usize::from(*length)));
        bytes = rest;
        now += Duration::from_millis(100);
        asked += 1;
        let Some(event) = event(*kind, message, now, RequestId(asked)) else { continue };
        answered.extend(core.handle(now, event).into_iter().map(|(request, _)| request));
    }
    let mut ticks = 0;
    while let Some(due) = core.next_deadline() {
        answered.extend(core.handle(due, Event::Tick).into_iter().map(|(request, _)| request));
        ticks += 1;
        assert!(ticks <= asked, "deadlines that never end");
    }
    assert_eq!(core.waiting(), 0);
    let count = answered.len();
    answered.sort_unstable();
    answered.dedup();
    assert_eq!(answered.len(), count, "a request is answered twice");
}

fn event(kind: u8, message: &[u8], now: Duration, id: RequestId) -> Option<Event> {
    Some(match kind % 8 {
        0 => Event::Join(id, codec::join(wire::JoinRequest::decode(message).ok()?, now).ok()?),
        1 => {
            let wire::SetRequest { epoch, key, value } = wire::SetRequest::decode(message).ok()?;
            Event::Set(id, Epoch(epoch), key, value)
        }
        2 => {
            let wire::GetRequest { epoch, key, timeout_ms } = wire::GetRequest::decode(message).ok()?;
            Event::Get(id, Epoch(epoch), key, codec::deadline(now, timeout_ms))
        }
        3 => {
            let wire::AddRequest { epoch, key, amount } = wire::AddRequest::decode(message).ok()?;
            Event::Add(id, Epoch(epoch), key, amount)
        }
        4 => {
            let request = wire::ReportRequest::decode(message).ok()?;
            let wire::ReportRequest { epoch, rank, cause, last_call, caused_by } = request;
            let report = Report { cause, last_call, caused_by: caused_by.map(Rank) };
            Event::Report(id, Epoch(epoch), Rank(rank), report)
        }
        5 => Event::Disconnected(RequestId(u64::from(*message.first()?))),
        6 => Event::JobFailed("a rank failed".into()),
        _ => Event::NewEpoch(Epoch(u64::from(*message.first()?))),
    })
}

/// Decodes a roster, as every rank gets it: it decodes to a value that encodes to the same again, or to an error.
pub fn roster(bytes: &[u8]) {
    if let Ok(joined) = codec::decode_roster(bytes) {
        assert_eq!(codec::decode_roster(&codec::encode(&joined)), Ok(joined));
    }
    if let Ok(refusal) = wire::Refusal::decode(bytes) {
        assert!(codec::error(refusal).to_string().len() < 64 * bytes.len() + 4096);
    }
}
