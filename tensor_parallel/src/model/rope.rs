//! The rotary part of `config.json`: `rope_parameters` as transformers 5 writes it, `rope_theta` and `rope_scaling` as 4 did.

use serde_json::Value;

use super::keys::Keys;
use crate::rotary::RotaryScaling;

/// Base frequency and scaling.
pub(super) fn parse(keys: &Keys<'_>, max_positions: usize) -> Result<(f64, RotaryScaling), String> {
    let theta = keys.number("rope_theta")?.unwrap_or(10_000.0);
    let (name, value) = match (keys.get("rope_parameters"), keys.get("rope_scaling")) {
        (Some(value), _) => ("rope_parameters", value),
        (None, Some(value)) => ("rope_scaling", value),
        (None, None) => return Ok((theta, RotaryScaling::None)),
    };
    let map = value.as_object().ok_or_else(|| format!("`{name}` must be an object, and is {value}"))?;
    if map.values().any(Value::is_object) {
        return Err(format!("`{name}` differs by kind of layer, which is not supported"));
    }
    let inner = Keys(map);
    let within = |reason: String| format!("`{name}`: {reason}");
    let theta = inner.number("rope_theta").map_err(within)?.unwrap_or(theta);
    if let Some(factor) = inner.number("partial_rotary_factor").map_err(within)?.filter(|f| *f != 1.0) {
        return Err(within(format!("`partial_rotary_factor` {factor} is not supported, only 1")));
    }
    let kind = match inner.text("rope_type").map_err(within)? {
        Some(kind) => kind,
        None => inner.text("type").map_err(within)?.unwrap_or("default"),
    };
    let scaling = scaling(&inner, kind, max_positions).map_err(within)?;
    Ok((theta, scaling))
}

fn scaling(keys: &Keys<'_>, kind: &str, max_positions: usize) -> Result<RotaryScaling, String> {
    let needed = |key: &str| keys.number(key)?.ok_or_else(|| format!("`{key}` is missing"));
    match kind {
        "default" => Ok(RotaryScaling::None),
        "linear" => Ok(RotaryScaling::Linear { factor: needed("factor")? }),
        "llama3" => {
            let original = keys.number("original_max_position_embeddings")?.unwrap_or(max_positions as f64);
            let (low, high) = (needed("low_freq_factor")?, needed("high_freq_factor")?);
            if high <= low {
                return Err(format!(
                    "`high_freq_factor` {high} must be greater than `low_freq_factor` {low}"
                ));
            }
            Ok(RotaryScaling::Llama3 {
                factor: needed("factor")?,
                low_frequency_factor: low,
                high_frequency_factor: high,
                original_positions: original,
            })
        }
        other => Err(format!("rope type `{other}` is not supported, only default, linear and llama3")),
    }
}
