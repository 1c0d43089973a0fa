//! The JSON log format: one object per line, with the keys that Kubernetes components use.
//!
//! `tracing-subscriber` also has a JSON format, but its keys (`timestamp`, `message`, `span`) are fixed, and it nests
//! span fields, so the position of a claim's uid would differ between lines.

use std::collections::BTreeMap;
use std::fmt;
use std::io::Write as _;

use serde::ser::{SerializeMap as _, Serializer as _};
use serde_json::Value;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::layer::Context;
use tracing_subscriber::registry::{LookupSpan, Scope};

/// The keys of every line, in order. An event field with one of these names is written as `field_<name>`.
const KEYS: [&str; 4] = ["ts", "level", "msg", "target"];

/// The field in which tracing passes an event's message.
const MESSAGE: &str = "message";

/// Writes one line per event. Fields of enclosing spans are included; the event's own fields win.
#[derive(Debug)]
pub(super) struct JsonLayer<W>(pub(super) W);

/// Fields of an event or a span.
#[derive(Default)]
struct Fields(BTreeMap<&'static str, Value>);

impl Fields {
    fn put(&mut self, field: &Field, value: impl Into<Value>) {
        self.0.insert(field.name(), value.into());
    }
}

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.put(field, format!("{value:?}"));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.put(field, value);
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.put(field, value);
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.put(field, value);
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        self.put(field, value);
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.put(field, value);
    }

    fn record_error(&mut self, field: &Field, value: &(dyn std::error::Error + 'static)) {
        self.put(field, value.to_string());
    }
}

impl<S, W> Layer<S> for JsonLayer<W>
where
    S: Subscriber + for<'lookup> LookupSpan<'lookup>,
    W: for<'writer> MakeWriter<'writer> + 'static,
{
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        let Some(span) = context.span(id) else { return };
        let mut fields = Fields::default();
        attributes.record(&mut fields);
        span.extensions_mut().insert(fields);
    }

    fn on_record(&self, id: &Id, record: &Record<'_>, context: Context<'_, S>) {
        let Some(span) = context.span(id) else { return };
        if let Some(fields) = span.extensions_mut().get_mut::<Fields>() {
            record.record(fields);
        }
    }

    fn on_event(&self, event: &Event<'_>, context: Context<'_, S>) {
        let mut fields = Fields::default();
        for span in context.event_scope(event).into_iter().flat_map(Scope::from_root) {
            if let Some(outer) = span.extensions().get::<Fields>() {
                fields
                    .0
                    .extend(outer.0.iter().map(|(name, value)| (*name, value.clone())));
            }
        }
        // A span may have a field of this name; only the event's message is logged.
        fields.0.remove(MESSAGE);
        event.record(&mut fields);
        let now = jiff::Timestamp::now();
        if let Ok(mut line) = line(now, event.metadata(), fields) {
            line.push(b'\n');
            // One write, so that lines from several threads do not interleave. A write error cannot be reported
            // anywhere.
            let _ = self.0.make_writer_for(event.metadata()).write_all(&line);
        }
    }
}

fn line(
    now: jiff::Timestamp,
    metadata: &tracing::Metadata<'_>,
    mut fields: Fields,
) -> serde_json::Result<Vec<u8>> {
    let message = fields.0.remove(MESSAGE).unwrap_or_default();
    let mut line = Vec::with_capacity(256);
    let mut serializer = serde_json::Serializer::new(&mut line);
    let mut object = serializer.serialize_map(None)?;
    object.serialize_entry("ts", &format_args!("{now:.6}"))?;
    object.serialize_entry("level", &metadata.level().as_str().to_ascii_lowercase())?;
    object.serialize_entry("msg", message.as_str().unwrap_or_default())?;
    object.serialize_entry("target", metadata.target())?;
    for (name, value) in &fields.0 {
        if KEYS.contains(name) {
            object.serialize_entry(&format_args!("field_{name}"), value)?;
        } else {
            object.serialize_entry(name, value)?;
        }
    }
    object.end()?;
    Ok(line)
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::sync::{Arc, Mutex};

    use tracing_subscriber::layer::SubscriberExt as _;

    use super::*;

    #[derive(Clone, Default)]
    struct Buffer(Arc<Mutex<Vec<u8>>>);

    impl io::Write for Buffer {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().expect("not poisoned").write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn lines(log: impl FnOnce()) -> Vec<String> {
        let buffer = Buffer::default();
        let writer = buffer.clone();
        let subscriber = tracing_subscriber::registry().with(JsonLayer(move || writer.clone()));
        tracing::subscriber::with_default(subscriber, log);
        let bytes = buffer.0.lock().expect("not poisoned").clone();
        String::from_utf8(bytes)
            .expect("UTF-8")
            .lines()
            .map(str::to_owned)
            .collect()
    }

    fn parsed(log: impl FnOnce()) -> Value {
        let lines = lines(log);
        assert_eq!(lines.len(), 1, "{lines:?}");
        serde_json::from_str(&lines[0]).expect("JSON")
    }

    #[test]
    fn a_line_begins_with_time_level_message_and_target() {
        let lines = lines(|| tracing::warn!(target: "drayman::x", claim = "a/b", "held by another"));

        assert!(lines[0].starts_with("{\"ts\":\"2"), "{lines:?}");
        let rest = r#"Z","level":"warn","msg":"held by another","target":"drayman::x","claim":"a/b"}"#;
        assert!(lines[0].ends_with(rest), "{lines:?}");
        let object: Value = serde_json::from_str(&lines[0]).expect("JSON");
        assert!(
            object["ts"]
                .as_str()
                .expect("a text")
                .parse::<jiff::Timestamp>()
                .is_ok()
        );
    }

    #[test]
    fn values_keep_their_type_and_stay_on_one_line() {
        let error = io::Error::other("disk\nfull");
        let object = parsed(|| {
            tracing::info!(
                count = 3,
                below = -1,
                share = 0.5,
                ready = true,
                error = &error as &dyn std::error::Error,
                display = %"x\"y",
                debug = ?Some(1),
                "two\nlines \u{1b}[31m"
            );
        });

        assert_eq!(object["count"], 3);
        assert_eq!(object["below"], -1);
        assert_eq!(object["share"], 0.5);
        assert_eq!(object["ready"], true);
        assert_eq!(object["error"], "disk\nfull");
        assert_eq!(object["display"], "x\"y");
        assert_eq!(object["debug"], "Some(1)");
        assert_eq!(object["msg"], "two\nlines \u{1b}[31m");
    }

    #[test]
    fn fields_of_an_event_win_over_those_of_its_spans() {
        let object = parsed(|| {
            let outer = tracing::info_span!(
                "prepare",
                claim = "outer",
                method = "x",
                node = tracing::field::Empty
            );
            outer.record("node", "n1");
            let _outer = outer.enter();
            let _inner = tracing::info_span!("cdi", method = "y", message = "not the event's").entered();
            tracing::info!(claim = "inner", "written");
        });

        assert_eq!(object["msg"], "written");
        assert_eq!(object["claim"], "inner");
        assert_eq!(object["method"], "y");
        assert_eq!(object["node"], "n1");
    }

    #[test]
    fn fields_cannot_replace_the_keys() {
        let object = parsed(|| tracing::info!(level = "fake", ts = 0, "real"));

        assert_eq!(object["level"], "info");
        assert_eq!(object["field_level"], "fake");
        assert_eq!(object["field_ts"], 0);
    }
}
