//! Shared parts of drawings: escaped texts, and their widths. Pure.

/// Escapes a text for HTML or SVG.
pub(crate) fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// Returns the maximum width of a text in a monospaced font of this size. The usual fonts advance by 0.6 of their size or less,
/// `DejaVu Sans Mono` by 0.602.
pub(crate) fn text_width(text: &str, size: f64) -> f64 {
    text.chars().count() as f64 * size * 0.605
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Fails if a text of an SVG exceeds its view box.
    pub(crate) fn assert_unclipped(svg: &str, size: f64) {
        let number = |tag: &str, name: &str| -> f64 {
            let (_, rest) =
                tag.split_once(&format!(" {name}=\"")).unwrap_or_else(|| panic!("no {name} in {tag}"));
            rest.split('"').next().and_then(|text| text.parse().ok()).expect("a number")
        };
        let (_, view) = svg.split_once("viewBox=\"0 0 ").expect("a view box");
        let view: Vec<f64> = view
            .split('"')
            .next()
            .expect("a view box")
            .split(' ')
            .map(|n| n.parse().expect("a number"))
            .collect();
        let mut seen = 0;
        for element in svg.split("<text").skip(1) {
            let (tag, rest) = element.split_once('>').expect("a tag");
            let content = rest.split("</text>").next().expect("a text");
            let content = content
                .replace("&lt;", "<")
                .replace("&gt;", ">")
                .replace("&quot;", "'")
                .replace("&amp;", "&");
            let (x, y, width) = (number(tag, "x"), number(tag, "y"), text_width(&content, size));
            let left = match tag {
                tag if tag.contains("middle") => x - width / 2.0,
                tag if tag.contains("\"end\"") => x - width,
                _ => x,
            };
            assert!(
                left >= 0.0 && left + width <= view[0],
                "`{content}` from {left} to {}, of {}",
                left + width,
                view[0]
            );
            assert!(y - size >= 0.0 && y + size * 0.25 <= view[1], "`{content}` at {y}, of {}", view[1]);
            seen += 1;
        }
        assert!(seen > 0, "no texts");
    }
}
