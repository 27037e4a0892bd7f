//! Sends one encoded roster to every rank without a copy for each: `n` rosters of `n` ranks would fill the memory.

use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::{BufMut as _, Bytes, BytesMut};
use http_body::{Body as HttpBody, Frame};
use prost::Message as _;
use prost::encoding::{WireType, encode_key, encode_varint, encoded_len_varint, key_len};
use ryzanstein_process_group::Rank;
use tonic::body::Body;
use tonic::codegen::http;
use tonic::{Response, Status};

use crate::control::JoinReply;

/// Field number of `JoinReply.roster`.
const ROSTER: u32 = 3;

/// The roster of a reply, for [`attach`].
#[derive(Clone)]
struct Roster {
    rank: Rank,
    encoded: Bytes,
}

/// Returns the reply to a rank that has joined. [`attach`] adds the roster.
pub(super) fn reply(rank: Rank, encoded: Bytes) -> Response<JoinReply> {
    let mut response = Response::new(JoinReply::default());
    response.extensions_mut().insert(Roster { rank, encoded });
    response
}

/// Replaces the message that tonic has encoded by one with the roster, if there is one to send.
pub(super) fn attach(mut response: http::Response<Body>) -> http::Response<Body> {
    match response.extensions_mut().remove::<Roster>() {
        Some(roster) => response.map(|body| Body::new(RosterBody::new(roster, body))),
        None => response,
    }
}

/// A gRPC message in two frames, of which the second is shared, then the trailers of another body.
struct RosterBody {
    frames: std::array::IntoIter<Bytes, 2>,
    trailers: Body,
}

impl RosterBody {
    fn new(Roster { rank, encoded }: Roster, trailers: Body) -> Self {
        let fields = JoinReply { rank: rank.0, ..JoinReply::default() };
        let length = encoded.len() as u64;
        let message = fields.encoded_len() + key_len(ROSTER) + encoded_len_varint(length) + encoded.len();
        let mut head = BytesMut::with_capacity(32);
        // Not compressed; see gRPC's specification of messages over HTTP/2.
        head.put_u8(0);
        head.put_u32(u32::try_from(message).expect("a roster is bounded by the number of ranks"));
        fields.encode(&mut head).expect("it grows");
        encode_key(ROSTER, WireType::LengthDelimited, &mut head);
        encode_varint(length, &mut head);
        Self { frames: [head.freeze(), encoded].into_iter(), trailers }
    }
}

impl HttpBody for RosterBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        if let Some(bytes) = self.frames.next() {
            return Poll::Ready(Some(Ok(Frame::data(bytes))));
        }
        loop {
            match std::task::ready!(Pin::new(&mut self.trailers).poll_frame(context)) {
                Some(Ok(frame)) if frame.is_data() => {}
                other => return Poll::Ready(other),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_two_frames_are_one_message_with_the_roster() {
        let roster = Roster { rank: Rank(7), encoded: Bytes::from_static(&[9; 300]) };
        let mut bytes: Vec<u8> = RosterBody::new(roster, Body::empty()).frames.flatten().collect();
        let message = bytes.split_off(5);
        assert_eq!(bytes, [&[0][..], &(message.len() as u32).to_be_bytes()].concat());
        let reply = JoinReply::decode(&message[..]).unwrap();
        assert_eq!((reply.rank, &reply.roster[..], reply.refusal), (7, &[9; 300][..], None));
    }
}
