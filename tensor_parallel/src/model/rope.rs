//! The rotary settings of `config.json`: `rope_parameters` as in transformers 5, `rope_theta` and `rope_scaling` as in version 4.

use serde_json::Value;

use super::json::{JsonObject, missing, shortened};
use crate::rotary::Rotary;

/// The supported types of scaling.
const TYPES: [&str; 6] = ["default", "linear", "dynamic", "yarn", "longrope", "llama3"];

/// Limit of the positions, far above that of any model.
const MOST_POSITIONS: f64 = (1u64 << 31) as f64;

/// The rotary settings of a model.
pub(super) struct Rope {
    pub(super) rotary: Rotary,
    /// The maximum sequence length.
    pub(super) max_positions: usize,
    /// A setting that is ignored.
    pub(super) remark: Option<String>,
}

/// Base frequency, type and scaling, with the number of positions that the scaling extends the model to, or 0.
type Scaled = (f64, &'static str, Rotary, f64);

/// Parses the rotary settings. `positions` is `max_position_embeddings`.
pub(super) fn parse(keys: &JsonObject<'_>, head_dim: usize, positions: usize) -> Result<Rope, String> {
    let settings = Settings {
        theta: keys.number("rope_theta")?.unwrap_or(10_000.0),
        original: keys.number("original_max_position_embeddings")?,
        head_dim,
        positions: positions as f64,
    };
    let new = settings.parse(keys, "rope_parameters")?;
    let old = settings.parse(keys, "rope_scaling")?;
    if new.is_some() && old.is_some() && new != old {
        return Err("`rope_parameters` and `rope_scaling` contradict each other, each with its own `rope_theta` or that next to \
                    it; remove the one that does not belong to the weights"
            .into());
    }
    let plain = || (settings.theta, "default", Rotary::new(head_dim, settings.theta), 0.0);
    let (theta, kind, rotary, extended) = new.or(old).unwrap_or_else(plain);
    let remark = partial_rotary_factor(keys, kind, head_dim)?;
    let max_positions = positions.max(extended.min(MOST_POSITIONS) as usize);
    if !rotary.is_finite(max_positions) {
        return Err(infinite(kind, theta, head_dim));
    }
    Ok(Rope { rotary, max_positions, remark })
}

/// Returns a remark if `partial_rotary_factor` is ignored. In transformers, these architectures rotate whole heads: unscaled
/// frequencies do not depend on the factor, and scaled ones of another number cannot be applied.
fn partial_rotary_factor(
    keys: &JsonObject<'_>,
    kind: &'static str,
    head_dim: usize,
) -> Result<Option<String>, String> {
    let key = "partial_rotary_factor";
    let within =
        ["rope_parameters", "rope_scaling"].into_iter().find_map(|object| keys.get(object)?.get(key));
    let Some(found) = within.or_else(|| keys.get(key)) else { return Ok(None) };
    let is_whole = found.as_f64().is_some_and(|factor| (head_dim as f64 * factor) as usize == head_dim);
    if is_whole {
        return Ok(None);
    }
    if kind != "default" {
        return Err(format!(
            "`{key}` {} is not supported with rope type `{kind}`, only 1: as in transformers, this architecture rotates whole \
             heads; download the config.json that belongs to the weights",
            shortened(&found.to_string())
        ));
    }
    Ok(Some(format!(
        "`{key}` {found} of config.json is ignored, as in transformers: this architecture rotates whole heads"
    )))
}

/// Values on which the settings within an object depend.
struct Settings {
    theta: f64,
    /// `original_max_position_embeddings`, which transformers prefers to that within the object.
    original: Option<f64>,
    head_dim: usize,
    /// `max_position_embeddings`
    positions: f64,
}

impl Settings {
    /// Parses the object of a key: base frequency, type and scaling. As in transformers, what is false in Python counts as missing.
    fn parse(&self, keys: &JsonObject<'_>, key: &str) -> Result<Option<Scaled>, String> {
        if keys.truthy(key).is_none() {
            return Ok(None);
        }
        let Some(map) = keys.optional(key, "an object", Value::as_object)? else { return Ok(None) };
        if map.values().any(Value::is_object) {
            return Err(format!("`{key}` differs by kind of layer, which is not supported"));
        }
        self.within(&JsonObject(map)).map(Some).map_err(|reason| format!("`{key}`: {reason}"))
    }

    fn within(&self, keys: &JsonObject<'_>) -> Result<Scaled, String> {
        let theta = keys.number("rope_theta")?.unwrap_or(self.theta);
        let named = match keys.text("rope_type")? {
            Some(kind) => kind,
            None => keys.text("type")?.unwrap_or("default"),
        };
        let kind = TYPES.into_iter().find(|kind| *kind == named);
        let kind = kind.ok_or_else(|| {
            format!("rope type `{}` is not supported, only {}", shortened(named), TYPES.join(", "))
        })?;
        let (head_dim, positions) = (self.head_dim, self.positions);
        let (rotary, extended) = match kind {
            "linear" => {
                let factor = required(keys, "factor")?;
                (Rotary::linear(head_dim, theta, factor), factor * positions)
            }
            "dynamic" => {
                let factor = required(keys, "factor")?;
                (Rotary::dynamic(head_dim, theta, factor, positions), factor * positions)
            }
            "yarn" => self.yarn(keys, theta)?,
            "longrope" => self.longrope(keys, theta)?,
            "llama3" => (self.llama3(keys, theta)?, 0.0),
            _ => (Rotary::new(head_dim, theta), 0.0),
        };
        Ok((theta, kind, rotary, extended))
    }

    fn original(&self, keys: &JsonObject<'_>) -> Result<f64, String> {
        let within = keys.number("original_max_position_embeddings")?;
        Ok(self.original.or(within).unwrap_or(self.positions))
    }

    fn yarn(&self, keys: &JsonObject<'_>, theta: f64) -> Result<(Rotary, f64), String> {
        if theta == 1.0 {
            return Err(infinite("yarn", theta, self.head_dim));
        }
        let original = self.original(keys)?;
        let factor = match keys.number("factor")? {
            // As in transformers, the key must be there.
            None if keys.0.contains_key("factor") => self.positions / original,
            None => return Err(missing("factor")),
            Some(factor) => factor,
        };
        // Zero counts as missing.
        let number = |key| {
            let number = keys.optional(key, "a number of 0 or more", |v| v.as_f64().filter(|n| *n >= 0.0))?;
            Ok::<_, String>(number.filter(|n| *n > 0.0))
        };
        let scale = |by: f64| if factor <= 1.0 { 1.0 } else { 0.1 * by * factor.ln() + 1.0 };
        let attention_factor =
            match (keys.number("attention_factor")?, number("mscale")?, number("mscale_all_dim")?) {
                (Some(factor), ..) => factor,
                (None, Some(mscale), Some(all)) => scale(mscale) / scale(all),
                _ => scale(1.0),
            };
        let turns = [number("beta_fast")?.unwrap_or(32.0), number("beta_slow")?.unwrap_or(1.0)];
        let truncate = !keys.0.contains_key("truncate") || keys.flag("truncate")?;
        let rotary = Rotary::yarn(self.head_dim, theta, factor, original, turns, truncate);
        Ok((rotary.amplified(attention_factor), factor * original))
    }

    fn longrope(&self, keys: &JsonObject<'_>, theta: f64) -> Result<(Rotary, f64), String> {
        let count = self.head_dim / 2;
        let list = |key| {
            let positive = |v: &Value| v.as_f64().filter(|n| *n > 0.0).map(|n| n as f32);
            let list = keys.get(key).ok_or_else(|| missing(key))?;
            let numbers: Option<Vec<f32>> =
                list.as_array().and_then(|list| list.iter().map(positive).collect());
            numbers.filter(|numbers| numbers.len() == count).ok_or_else(|| {
                format!("`{key}` must be a list of {count} positive numbers, one for each pair of elements of a head")
            })
        };
        let original = self.original(keys)?;
        let factor = keys.number("factor")?.unwrap_or(self.positions / original);
        let inferred = if factor <= 1.0 { 1.0 } else { (1.0 + factor.ln() / original.ln()).sqrt() };
        let (short, long) = (list("short_factor")?, list("long_factor")?);
        let rotary = Rotary::longrope(self.head_dim, theta, original, &short, &long);
        Ok((rotary.amplified(keys.number("attention_factor")?.unwrap_or(inferred)), factor * original))
    }

    fn llama3(&self, keys: &JsonObject<'_>, theta: f64) -> Result<Rotary, String> {
        let (low, high) = (required(keys, "low_freq_factor")?, required(keys, "high_freq_factor")?);
        if high <= low {
            return Err(format!("`high_freq_factor` {high} must be greater than `low_freq_factor` {low}"));
        }
        let (factor, original) = (required(keys, "factor")?, self.original(keys)?);
        Ok(Rotary::llama3(self.head_dim, theta, factor, original, [low, high]))
    }
}

fn required(keys: &JsonObject<'_>, key: &str) -> Result<f64, String> {
    keys.number(key)?.ok_or_else(|| missing(key))
}

fn infinite(kind: &str, theta: f64, head_dim: usize) -> String {
    format!(
        "`rope_theta` {theta} with heads of {head_dim} elements and rope type {kind} gives no finite frequencies"
    )
}
