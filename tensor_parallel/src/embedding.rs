//! Token embedding and output head, with the vocabulary sharded over the ranks.
//!
//! [`shard::split_vocabulary`] shards both, with the same padding, so a model that ties them stores one matrix.

use std::sync::Arc;

use ryzanstein_process_group::DType;

use crate::checkpoint::{Loader, TensorSlice};
use crate::communicator::{Communicator, Shard};
use crate::compute::{Batch, Compute};
use crate::error::{RequestError, Result};
use crate::linear::gather_columns;
use crate::shard::{self, VocabularyShard};
use crate::tensor::Tensor;

/// This rank's rows of a `[vocabulary, hidden]` matrix, padded with zeros.
#[derive(Clone, Debug)]
pub struct VocabularyWeight {
    rows: Arc<Tensor>,
    first: usize,
    vocabulary: usize,
    shard: Shard,
}

impl VocabularyWeight {
    /// Loads `{name}.weight` `[vocabulary, hidden]`.
    ///
    /// # Errors
    /// Returns an error if the source fails.
    pub fn load(loader: &mut Loader<'_>, name: &str, vocabulary: usize, hidden: usize) -> Result<Self> {
        let VocabularyShard { padded, real } =
            shard::split_vocabulary(vocabulary, loader.world_size())?.swap_remove(loader.rank());
        let (name, shape) = (format!("{name}.weight"), [vocabulary, hidden]);
        let part = TensorSlice { rows: real, ..TensorSlice::whole(&name, &shape) };
        let rows = Arc::new(loader.padded(&part, padded.len())?);
        Ok(Self { rows, first: padded.start, vocabulary, shard: loader.shard() })
    }
}

/// Embeds tokens. Each rank looks up the tokens in its shard; the sum over all ranks contains every token.
#[derive(Debug)]
pub struct VocabParallelEmbedding {
    weight: VocabularyWeight,
}

impl VocabParallelEmbedding {
    /// Creates an embedding with this weight.
    pub fn new(weight: VocabularyWeight) -> Self {
        Self { weight }
    }

    /// Returns the embeddings of the batch's tokens, in type `out`. Takes one all-reduce.
    ///
    /// # Errors
    /// Returns an error if a token is not in the vocabulary, or the group fails or is not that of loading.
    pub fn forward(
        &self,
        batch: &Batch,
        out: DType,
        compute: &dyn Compute,
        group: &mut dyn Communicator,
    ) -> Result<Tensor> {
        self.weight.shard.check(group)?;
        check_tokens(batch.tokens(), self.weight.vocabulary)?;
        let mut x = compute.embed(&self.weight.rows, self.weight.first, batch, out)?;
        group.all_reduce_sum(&mut x)?;
        Ok(x)
    }
}

/// Returns an error if a token is not in the vocabulary.
pub(crate) fn check_tokens(tokens: &[u32], vocabulary: usize) -> Result<()> {
    match tokens.iter().find(|t| **t as usize >= vocabulary) {
        Some(token) => Err(RequestError::UnknownToken { token: *token, vocabulary }.into()),
        None => Ok(()),
    }
}

/// Computes logits from hidden states.
#[derive(Debug)]
pub struct ParallelLmHead {
    weight: VocabularyWeight,
}

impl ParallelLmHead {
    /// Creates a head with this weight, which is that of the embedding if the model ties them.
    pub fn new(weight: VocabularyWeight) -> Self {
        Self { weight }
    }

    /// Returns the logits `[positions, vocabulary]` in `f32`, complete and identical on every rank, without padding. Takes one
    /// all-gather.
    ///
    /// They stay `f32` even if `x` has a 16-bit type: rounding would create ties, and a tie selects the lower token.
    ///
    /// # Errors
    /// Returns an error if shapes do not fit, the group fails, or is not that of loading.
    pub fn forward(&self, x: &Tensor, compute: &dyn Compute, group: &mut dyn Communicator) -> Result<Tensor> {
        let local = compute.linear(x, &self.weight.rows, None, DType::F32)?;
        gather_columns(&local, self.weight.vocabulary, compute, (self.weight.shard, group))
    }

    /// Returns candidates for the most likely token of each row, `[positions, pairs × 2]`, identical on every rank. Every rank computes
    /// [`Compute::argmax`] of its shard; the result has the pairs of all ranks, in the order of the ranks. Takes one all-gather.
    ///
    /// # Errors
    /// Returns the errors of [`forward`](Self::forward) and of [`Compute::argmax`].
    pub fn argmax(&self, x: &Tensor, compute: &dyn Compute, group: &mut dyn Communicator) -> Result<Tensor> {
        let VocabularyWeight { rows, first, vocabulary, shard } = &self.weight;
        let local = compute.linear(x, rows, None, DType::F32)?;
        let real = vocabulary.saturating_sub(*first).min(rows.rows());
        let mine = compute.argmax(&local, *first..first + real)?;
        let all = shard.world_size() * mine.columns();
        gather_columns(&mine, all, compute, (*shard, group))
    }
}
