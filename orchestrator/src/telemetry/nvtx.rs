//! Spans as ranges on the time line of an attached profiler.

use std::ffi::CString;
use std::fmt::{Debug, Write as _};

use ryzanstein_process_group::device::nvtx::Nvtx;
use tracing::Subscriber;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id};
use tracing_subscriber::filter::{FilterFn, LevelFilter};
use tracing_subscriber::layer::{Context, Layer};
use tracing_subscriber::registry::LookupSpan;

use super::BoxedLayer;

/// Shows all spans of this program, collectives too: whoever attaches a profiler wants to see them.
pub(super) fn layer(nvtx: Nvtx) -> BoxedLayer {
    let ours = FilterFn::new(|metadata| metadata.is_span() && metadata.target().starts_with("ryz"));
    Ranges(nvtx).with_filter(ours.with_max_level_hint(LevelFilter::DEBUG)).boxed()
}

struct Ranges(Nvtx);

/// What the time line shows of a span.
struct Name(CString);

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for Ranges {
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        let mut text = Text(attributes.metadata().name().to_owned());
        attributes.record(&mut text);
        if let Some(span) = context.span(id) {
            // No name of ours has a zero byte; such a one would be cut off.
            span.extensions_mut().insert(Name(CString::new(text.0).unwrap_or_default()));
        }
    }

    fn on_enter(&self, id: &Id, context: Context<'_, S>) {
        let Some(span) = context.span(id) else { return };
        if let Some(Name(name)) = span.extensions().get() {
            self.0.push(name);
        }
    }

    fn on_exit(&self, _: &Id, _: Context<'_, S>) {
        self.0.pop();
    }
}

struct Text(String);

impl Visit for Text {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        let _ = write!(self.0, " {field}={value:?}");
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        let _ = write!(self.0, " {field}={value}");
    }
}
