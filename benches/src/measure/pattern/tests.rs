use super::*;

/// A case: the operation, its reduction, the number of ranks, and its placement.
#[derive(Clone, Copy, Debug)]
struct Called {
    what: Collective,
    op: ReduceOp,
    n: usize,
    out_of_place: bool,
}

impl Called {
    fn patterns(self, rank: usize) -> Patterns {
        let patterns = Patterns::new(self.what, self.op, DType::U32, (rank, self.n), 1500, 1).unwrap();
        patterns.out_of_place(self.out_of_place)
    }

    /// Returns every rank's buffer before call number `call`, and its contribution: its input, or its buffer in place.
    fn filled(self, call: usize) -> (Vec<Vec<u32>>, Vec<Vec<u32>>) {
        let of_rank = |rank| {
            let patterns = self.patterns(rank);
            let mut buffer = vec![0u32; patterns.buffer_elements()];
            patterns.fill_buffer(bytemuck::cast_slice_mut(&mut buffer), call);
            let Some(elements) = patterns.input_elements() else { return (buffer.clone(), buffer) };
            let mut input = vec![0u32; elements];
            patterns.fill_input(bytemuck::cast_slice_mut(&mut input), call);
            (buffer, input)
        };
        (0..self.n).map(of_rank).unzip()
    }

    /// Returns the buffer of `rank` after a correct call, computed naively from all contributions.
    fn carried_out(self, before: &[u32], inputs: &[Vec<u32>], rank: usize) -> Vec<u32> {
        let Self { what, op, n, out_of_place } = self;
        let count = 1500;
        let chunk = |of: &[u32], p: usize| of[p * count..(p + 1) * count].to_vec();
        // In place, a rank's chunk is at its position in the whole array.
        let own = |p: usize| if out_of_place { inputs[p].clone() } else { chunk(&inputs[p], p) };
        let fold = |i: usize| {
            let all = inputs.iter().map(|b| b[i]);
            match op {
                ReduceOp::Sum => all.sum(),
                ReduceOp::Product => all.product(),
                ReduceOp::Min => all.min().unwrap(),
                ReduceOp::Max => all.max().unwrap(),
                ReduceOp::Avg => all.sum::<u32>() / n as u32,
            }
        };
        let put = |values: Vec<u32>| {
            if out_of_place {
                return values;
            }
            let mut all = before.to_vec();
            all[rank * count..(rank + 1) * count].copy_from_slice(&values);
            all
        };
        match what {
            Collective::AllReduce => (0..count).map(fold).collect(),
            Collective::Reduce if rank == 0 => (0..count).map(fold).collect(),
            Collective::Broadcast => inputs[0].clone(),
            Collective::ReduceScatter => put((rank * count..(rank + 1) * count).map(fold).collect()),
            Collective::AllGather => (0..n).flat_map(own).collect(),
            Collective::Gather if rank == 0 => (0..n).flat_map(own).collect(),
            Collective::Scatter => put(chunk(&inputs[0], rank)),
            Collective::AllToAll => (0..n).flat_map(|p| chunk(&inputs[p], rank)).collect(),
            Collective::SendRecv if rank % 2 == 1 => inputs[rank - 1].clone(),
            Collective::Reduce | Collective::Gather | Collective::SendRecv | Collective::Barrier => {
                before.to_vec()
            }
        }
    }

    fn wrong(self, rank: usize, after: &[u32], call: usize) -> u64 {
        self.patterns(rank).wrong(bytemuck::cast_slice(after), call, 1)
    }
}

/// Runs a test with every operation and reduction on every number of ranks up to 5, in place and out of place.
fn everything(test: impl Fn(Called)) {
    for n in 1..=5 {
        for what in Collective::ALL {
            let ops = if what.reduces() { ReduceOp::ALL } else { &[ReduceOp::Sum] };
            for &op in ops {
                let called = |out_of_place| Called { what, op, n, out_of_place };
                test(called(what.is_out_of_place()));
                if what.has_both_places() {
                    test(called(!what.is_out_of_place()));
                }
            }
        }
    }
}

#[test]
fn what_a_correct_call_leaves_has_no_wrong_element() {
    everything(|called| {
        let (buffers, inputs) = called.filled(3);
        for (rank, before) in buffers.iter().enumerate() {
            let after = called.carried_out(before, &inputs, rank);
            assert_eq!(called.wrong(rank, &after, 3), 0, "{called:?} on rank {rank}");
        }
    });
}

#[test]
fn a_call_that_does_nothing_is_seen_on_some_rank() {
    everything(|called| {
        if called.n == 1 || called.what == Collective::Barrier {
            return;
        }
        let (buffers, _) = called.filled(0);
        let wrong: u64 = (0..called.n).map(|rank| called.wrong(rank, &buffers[rank], 0)).sum();
        assert!(wrong >= 300, "{called:?}: {wrong}");
    });
}

#[test]
fn the_result_of_an_earlier_call_is_seen() {
    everything(|called| {
        // Among many ranks every product, minimum or maximum has the same few values.
        if called.n == 1 || called.what == Collective::Barrier || called.op == ReduceOp::Product {
            return;
        }
        let (buffers, inputs) = called.filled(3);
        let after = called.carried_out(&buffers[0], &inputs, 0);
        let wrong = called.wrong(0, &after, 4);
        assert!(wrong >= 300, "{called:?}: {wrong}");
    });
}

#[test]
fn one_wrong_element_counts_once_whatever_its_type() {
    for dtype in DType::ALL {
        let patterns = Patterns::new(Collective::Broadcast, ReduceOp::Sum, *dtype, (0, 2), 1500, 1).unwrap();
        let mut bytes = vec![0; 1500 * dtype.size()];
        patterns.fill_buffer(&mut bytes, 7);
        assert_eq!(patterns.wrong(&bytes, 7, 1), 0, "{dtype}");
        bytes[1499 * dtype.size()] ^= 1;
        assert_eq!(patterns.wrong(&bytes, 7, 1), 1, "{dtype}");
    }
}

#[test]
fn a_reduction_that_cannot_be_exact_is_refused_with_the_way_out() {
    let fits = |op, dtype, n| Operands::that_fit(op, dtype, n).is_ok();
    assert!(fits(ReduceOp::Sum, DType::BF16, 8) && fits(ReduceOp::Sum, DType::I8, 127));
    assert!(fits(ReduceOp::Product, DType::BF16, 16) && fits(ReduceOp::Max, DType::U8, 100));
    assert!(!fits(ReduceOp::Sum, DType::BF16, 257));
    let error = Patterns::new(Collective::AllReduce, ReduceOp::Sum, DType::I8, (0, 200), 1, 1).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("sum of i8 among 200 ranks") && text.contains("--dtype"), "{text}");
}

#[test]
fn a_chain_of_sums_multiplies_by_the_ranks_and_stays_exact() {
    let chain = longest_chain(Collective::AllReduce, ReduceOp::Sum, DType::F16, 4);
    assert_eq!(chain, 3, "36 × 4 × 4 is at most 2048, and once more is not");
    assert_eq!(longest_chain(Collective::AllReduce, ReduceOp::Sum, DType::I64, 2), 8);
    assert_eq!(longest_chain(Collective::AllReduce, ReduceOp::Max, DType::F64, 2), 1);
    assert_eq!(longest_chain(Collective::AllGather, ReduceOp::Sum, DType::F64, 2), 1);
    let patterns = Patterns::new(Collective::AllReduce, ReduceOp::Sum, DType::F16, (0, 4), 9, chain).unwrap();
    let operands = Operands::that_fit(ReduceOp::Sum, DType::F16, 4).unwrap();
    let after: Vec<u8> =
        (0..9).flat_map(|i| f16::from_f64((operands.reduced(i) * 16) as f64).to_ne_bytes()).collect();
    assert_eq!(patterns.wrong(&after, 0, 3), 0);
    assert!(patterns.wrong(&after, 0, 2) > 0);
}
