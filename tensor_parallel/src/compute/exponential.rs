//! The exponential function in a form that compilers vectorise.

/// Computes `e^x` within one unit in the last place; `x` is clamped to −87..=88. The polynomial is that of Cephes' `expf`.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    /// A constant whose addition to a small number leaves the nearest integer in the low bits.
    const ROUND: f32 = 12_582_912.0;
    /// The logarithm of 2 in two parts. The first has few bits, so that its product with an integer is exact.
    const LN_2: [f32; 2] = [0.693_359_4, -2.121_944_4e-4];
    const POLYNOMIAL: [f32; 6] =
        [1.987_569_1e-4, 1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5];
    // The comparison keeps NaN.
    let x = if x < -87.0 { -87.0 } else { x };
    let x = if x > 88.0 { 88.0 } else { x };
    let shifted = x * std::f32::consts::LOG2_E + ROUND;
    let whole = shifted - ROUND;
    let rest = x - whole * LN_2[0] - whole * LN_2[1];
    let mut sum = POLYNOMIAL[0];
    for factor in &POLYNOMIAL[1..] {
        sum = sum * rest + factor;
    }
    let power = shifted.to_bits().wrapping_sub(ROUND.to_bits()).wrapping_add(127) << 23;
    (sum * rest * rest + rest + 1.0) * f32::from_bits(power)
}

#[cfg(test)]
mod tests {
    use super::exp;

    #[test]
    fn it_is_the_librarys_within_one_unit_and_keeps_what_is_not_a_number() {
        assert!(exp(f32::NAN).is_nan());
        assert_eq!(exp(0.0).to_bits(), 1.0f32.to_bits());
        assert!(exp(f32::NEG_INFINITY) < 2e-38 && exp(f32::INFINITY) > 1e38);
        for i in -870_000..=880_000 {
            let x = i as f32 * 1e-4;
            let want = f64::from(x).exp();
            let unit = 2f64.powi(want.log2().floor() as i32 - 23);
            assert!((f64::from(exp(x)) - want).abs() <= unit, "e^{x}: {} is not {want}", exp(x));
        }
    }
}
