//! Values instead of buffers: any type that serde supports, sent as MessagePack.

use std::collections::BTreeMap;

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::ProcessGroup;
use crate::error::{Error, Result};
use crate::types::dtype::Element;
use crate::types::operation::Composed;
use crate::types::rank::Rank;

impl ProcessGroup {
    /// Returns the root's value on every rank. `value` is `Some` on the root; elsewhere it is ignored.
    pub fn broadcast_object<T: Serialize + DeserializeOwned>(
        &mut self,
        value: Option<&T>,
        root: Rank,
    ) -> Result<T> {
        let mut bytes = Vec::new();
        if self.rank() == root {
            let value = value.ok_or_else(|| Error::invalid("broadcast_object needs a value on the root"))?;
            bytes = encode(value)?;
        }
        let mut length = [bytes.len() as u64];
        self.compose(Composed::BROADCAST_OBJECT, |group| {
            group.broadcast_values(&mut length, root)?;
            bytes.resize(length[0] as usize, 0);
            group.broadcast_values(&mut bytes, root)
        })?;
        decode(&bytes, root)
    }

    /// Returns the values of all ranks on every rank, in rank order.
    pub fn all_gather_object<T: Serialize + DeserializeOwned>(&mut self, value: &T) -> Result<Vec<T>> {
        let mine = encode(value)?;
        let mut lengths = vec![0u64; self.world_size()];
        let (longest, all) = self.compose(Composed::ALL_GATHER_OBJECT, |group| {
            group.all_gather_values(&[mine.len() as u64], &mut lengths)?;
            // All chunks of an all-gather have one length: that of the longest value.
            let longest = lengths.iter().copied().max().unwrap_or(0) as usize;
            let mut padded = mine;
            padded.resize(longest, 0);
            let mut all = vec![0u8; longest * group.world_size()];
            group.all_gather_values(&padded, &mut all)?;
            Ok((longest, all))
        })?;
        Rank::all(self.world_size())
            .map(|rank| decode(&all[rank.index() * longest..][..lengths[rank.index()] as usize], rank))
            .collect()
    }

    /// Broadcasts host memory, whatever memory the backend works on.
    fn broadcast_values<T: Element>(&mut self, values: &mut [T], root: Rank) -> Result<()> {
        if self.device.is_none() {
            return self.broadcast(values, root);
        }
        let mut placed = self.upload(values)?;
        self.broadcast(&mut placed, root)?;
        values.copy_from_slice(&self.download(&placed)?);
        Ok(())
    }

    /// Gathers host memory on all ranks, whatever memory the backend works on.
    fn all_gather_values<T: Element>(&mut self, input: &[T], output: &mut [T]) -> Result<()> {
        if self.device.is_none() {
            return self.all_gather_into(input, output);
        }
        let (placed, mut all) = (self.upload(input)?, self.upload(output)?);
        self.all_gather_into(&placed, &mut all)?;
        output.copy_from_slice(&self.download(&all)?);
        Ok(())
    }

    /// Returns on every rank a map from each rank to its metrics.
    pub fn gather_metrics(
        &mut self,
        metrics: &BTreeMap<String, f64>,
    ) -> Result<BTreeMap<Rank, BTreeMap<String, f64>>> {
        Ok(Rank::all(self.world_size()).zip(self.all_gather_object(metrics)?).collect())
    }
}

pub(super) fn encode<T: Serialize>(value: &T) -> Result<Vec<u8>> {
    rmp_serde::to_vec_named(value).map_err(|e| Error::invalid(format!("the value cannot be serialised: {e}")))
}

pub(super) fn decode<T: DeserializeOwned>(bytes: &[u8], from: Rank) -> Result<T> {
    rmp_serde::from_slice(bytes).map_err(|e| {
        Error::invalid(format!(
            "the value from rank {from} is not what this rank expects ({e}); ranks must use one type"
        ))
    })
}
