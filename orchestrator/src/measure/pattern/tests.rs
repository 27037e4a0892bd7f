use super::*;

/// What `n` correct ranks would leave in the buffer of `rank`, computed the slow way from their buffers.
fn carry_out(
    what: Collective,
    op: ReduceOp,
    buffers: &[Vec<u32>],
    inputs: &[Vec<u32>],
    rank: usize,
) -> Vec<u32> {
    let n = buffers.len();
    let count = buffers[0].len() / if what.is_chunked() { n } else { 1 };
    let chunk = |of: &[u32], p: usize| of[p * count..(p + 1) * count].to_vec();
    let fold = |i: usize| {
        let all = buffers.iter().map(|b| b[i]);
        match op {
            ReduceOp::Sum => all.sum(),
            ReduceOp::Product => all.product(),
            ReduceOp::Min => all.min().unwrap(),
            ReduceOp::Max => all.max().unwrap(),
            ReduceOp::Avg => all.sum::<u32>() / n as u32,
        }
    };
    let mut mine = buffers[rank].clone();
    let mut set = |p: usize, values: Vec<u32>| mine[p * count..(p + 1) * count].copy_from_slice(&values);
    match what {
        Collective::AllReduce => return (0..count).map(fold).collect(),
        Collective::Reduce if rank == 0 => return (0..count).map(fold).collect(),
        Collective::Broadcast => return buffers[0].clone(),
        Collective::ReduceScatter => set(rank, (rank * count..(rank + 1) * count).map(fold).collect()),
        Collective::AllGather => (0..n).for_each(|p| set(p, chunk(&buffers[p], p))),
        Collective::Gather if rank == 0 => (0..n).for_each(|p| set(p, chunk(&buffers[p], p))),
        Collective::Scatter => set(rank, chunk(&buffers[0], rank)),
        Collective::AllToAll => (0..n).for_each(|p| set(p, chunk(&inputs[p], rank))),
        Collective::SendRecv if rank % 2 == 1 => return buffers[rank - 1].clone(),
        Collective::Reduce | Collective::Gather | Collective::SendRecv | Collective::Barrier => {}
    }
    mine
}

fn patterns(what: Collective, op: ReduceOp, dtype: DType, rank: usize, n: usize) -> Patterns {
    Patterns::new(what, op, dtype, (rank, n), 1500, 1).unwrap()
}

fn filled(patterns: &Patterns, call: usize) -> (Vec<u32>, Vec<u32>) {
    let mut buffer = vec![0u32; patterns.elements()];
    let mut input = vec![0u32; patterns.elements()];
    patterns.fill_buffer(bytemuck::cast_slice_mut(&mut buffer), call);
    if patterns.what.is_out_of_place() {
        patterns.fill_input(bytemuck::cast_slice_mut(&mut input), call);
    }
    (buffer, input)
}

/// Every operation and reduction on every number of ranks up to 5.
fn everything(test: impl Fn(Collective, ReduceOp, usize)) {
    for n in 1..=5 {
        for what in Collective::ALL {
            let ops = if what.reduces() { ReduceOp::ALL } else { &[ReduceOp::Sum] };
            for op in ops {
                test(what, *op, n);
            }
        }
    }
}

#[test]
fn what_a_correct_call_leaves_has_no_wrong_element() {
    everything(|what, op, n| {
        let of_ranks: Vec<_> = (0..n).map(|r| filled(&patterns(what, op, DType::U32, r, n), 3)).collect();
        let (buffers, inputs): (Vec<_>, Vec<_>) = of_ranks.into_iter().unzip();
        for rank in 0..n {
            let after = carry_out(what, op, &buffers, &inputs, rank);
            let wrong = patterns(what, op, DType::U32, rank, n).wrong(bytemuck::cast_slice(&after), 3, 1);
            assert_eq!(wrong, 0, "{what} {op} on rank {rank} of {n}");
        }
    });
}

#[test]
fn a_call_that_does_nothing_is_seen_on_some_rank() {
    everything(|what, op, n| {
        if n == 1 || what == Collective::Barrier {
            return;
        }
        let wrong: u64 = (0..n)
            .map(|rank| {
                let patterns = patterns(what, op, DType::U32, rank, n);
                patterns.wrong(bytemuck::cast_slice(&filled(&patterns, 0).0), 0, 1)
            })
            .sum();
        assert!(wrong >= 300, "{what} {op} of {n}: {wrong}");
    });
}

#[test]
fn the_result_of_an_earlier_call_is_seen() {
    everything(|what, op, n| {
        // Among many ranks every product, minimum or maximum has the same few values.
        if n == 1 || what == Collective::Barrier || op == ReduceOp::Product {
            return;
        }
        let of_ranks: Vec<_> = (0..n).map(|r| filled(&patterns(what, op, DType::U32, r, n), 3)).collect();
        let (buffers, inputs): (Vec<_>, Vec<_>) = of_ranks.into_iter().unzip();
        let after = carry_out(what, op, &buffers, &inputs, 0);
        let wrong = patterns(what, op, DType::U32, 0, n).wrong(bytemuck::cast_slice(&after), 4, 1);
        assert!(wrong >= 300, "{what} {op} of {n}: {wrong}");
    });
}

#[test]
fn one_wrong_element_counts_once_whatever_its_type() {
    for dtype in DType::ALL {
        let patterns = patterns(Collective::Broadcast, ReduceOp::Sum, *dtype, 0, 2);
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
