//! Events on the Node for changes of its devices.

use crate::api::crd::Devices;

/// Maximum number of events per change: unplugging a hub must not flood the API server.
const EVENTS_MAX: usize = 10;

/// An event on the Node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceEvent {
    /// CamelCase, from a small fixed set: the reason of the event.
    pub reason: &'static str,
    /// Whether a person should act on it.
    pub warning: bool,
    /// The text, written for users.
    pub note: String,
}

/// Returns the events for a change: one for each device that became unhealthy, recovered or was withdrawn.
///
/// `before` is the last published state, so that nothing is reported twice. A new healthy device causes no event.
pub fn device_events(before: &Devices, after: &Devices) -> Vec<DeviceEvent> {
    let mut events = Vec::new();
    for (name, device) in after {
        let earlier = before.get(name);
        let was = earlier.and_then(|device| device.unhealthy.as_deref());
        let described = format!("device {name} of kind {}", device.kind);
        match device.unhealthy.as_deref() {
            Some(cause) if was != Some(cause) => events.push(DeviceEvent {
                reason: "DeviceUnhealthy",
                warning: true,
                note: format!("{described} is not allocated: {cause}"),
            }),
            None if was.is_some() => events.push(DeviceEvent {
                reason: "DeviceRecovered",
                warning: false,
                note: format!("{described} is healthy again"),
            }),
            _ => {}
        }
    }
    for (name, device) in before.iter().filter(|(name, _)| !after.contains_key(*name)) {
        events.push(DeviceEvent {
            reason: "DeviceWithdrawn",
            warning: false,
            note: format!(
                "device {name} of kind {} is no longer offered: it is gone, or the configuration no longer describes it",
                device.kind
            ),
        });
    }
    let more = events.len().saturating_sub(EVENTS_MAX);
    if more > 0 {
        let warning = events.iter().any(|event| event.warning);
        events.sort_by_key(|event| !event.warning);
        events.truncate(EVENTS_MAX - 1);
        events.push(DeviceEvent {
            reason: "DevicesChanged",
            warning,
            note: format!(
                "{} more devices have changed; `drayman devices` lists all of them",
                more + 1
            ),
        });
    }
    events
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::crd::Device;

    fn devices(all: &[(&str, Option<&str>)]) -> Devices {
        let device = |(name, unhealthy): &(&str, Option<&str>)| {
            let device = Device {
                name: (*name).into(),
                kind: "k".into(),
                unhealthy: unhealthy.map(str::to_owned),
                ..Device::default()
            };
            ((*name).to_owned(), device)
        };
        all.iter().map(device).collect()
    }

    fn reasons(before: &[(&str, Option<&str>)], after: &[(&str, Option<&str>)]) -> Vec<&'static str> {
        device_events(&devices(before), &devices(after))
            .iter()
            .map(|event| event.reason)
            .collect()
    }

    #[test]
    fn each_change_is_reported_once_with_its_cause() {
        assert_eq!(reasons(&[], &[("a", None)]), Vec::<&str>::new());
        assert_eq!(reasons(&[], &[("a", Some("it smokes"))]), ["DeviceUnhealthy"]);
        assert_eq!(
            reasons(&[("a", Some("it smokes"))], &[("a", Some("it smokes"))]),
            Vec::<&str>::new()
        );
        assert_eq!(
            reasons(&[("a", Some("it smokes"))], &[("a", Some("it burns"))]),
            ["DeviceUnhealthy"]
        );
        assert_eq!(
            reasons(&[("a", Some("it smokes"))], &[("a", None)]),
            ["DeviceRecovered"]
        );
        assert_eq!(reasons(&[("a", None)], &[]), ["DeviceWithdrawn"]);
        let event = &device_events(&Devices::new(), &devices(&[("a", Some("it smokes"))]))[0];
        assert_eq!(event.note, "device a of kind k is not allocated: it smokes");
    }

    #[test]
    fn many_changes_are_counted_and_the_worst_are_named() {
        let names: Vec<String> = (0..1000).map(|number| format!("d{number:04}")).collect();
        let before: Vec<(&str, Option<&str>)> = names.iter().map(|name| (name.as_str(), None)).collect();
        let mut after = before.clone();
        after.truncate(500);
        after[499].1 = Some("it smokes");
        let events = device_events(&devices(&before), &devices(&after));
        assert_eq!(events.len(), EVENTS_MAX);
        assert_eq!(events[0].reason, "DeviceUnhealthy");
        assert!(events[EVENTS_MAX - 1].note.starts_with("492 more"), "{events:?}");
    }
}
