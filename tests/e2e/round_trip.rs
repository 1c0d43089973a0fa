//! Objects of the real API server are deserialized into our types and serialized again.

use crate::setup::{FINALIZER, Setup, is_allocated, pod_from};

#[tokio::test]
async fn an_object_that_is_read_and_written_back_is_the_same() -> anyhow::Result<()> {
    let setup = Setup::start(0).await?;
    setup.make_fake_devices("node-a", 1).await?;
    setup.make_template(None).await?;
    let controller = setup.controller()?;
    setup.serve("pod").await?;
    let pod = setup.pods().get("pod").await?;
    let claim = setup.claim_of("pod", "allocated", is_allocated).await?;
    let claim = claim.metadata.name.unwrap_or_default();
    let namespaced = "/apis/resource.k8s.io/v1alpha2/namespaces/default";
    for (path, read) in [
        (
            "/apis/resource.k8s.io/v1alpha2/resourceclasses/test".to_owned(),
            Kind::Class,
        ),
        (format!("{namespaced}/resourceclaims/{claim}"), Kind::Claim),
        (
            format!("{namespaced}/resourceclaimtemplates/test"),
            Kind::Template,
        ),
        ("/api/v1/namespaces/default/pods/pod".to_owned(), Kind::Pod),
    ] {
        let raw = setup.cluster.kubectl(&["get", "--raw", &path]).await?;
        let mut raw: serde_json::Value = serde_json::from_str(&raw)?;
        let ours = read.round_trip(&raw)?;
        // The kind is implied, nulls are equivalent to missing fields, and our Pod has only the claim-related status.
        drop_nulls(&mut raw);
        for field in ["kind", "apiVersion"] {
            raw.as_object_mut().and_then(|object| object.remove(field));
        }
        if matches!(read, Kind::Pod) {
            raw["status"] = ours["status"].clone();
        }
        assert_eq!(ours, raw, "{path}");
    }
    assert!(pod.metadata.name.is_some() && claim.starts_with("pod-device"));
    assert_eq!(FINALIZER, "drayman.dev/deletion-protection");
    setup.end([controller]).await
}

fn drop_nulls(value: &mut serde_json::Value) {
    match value {
        serde_json::Value::Object(fields) => {
            fields.retain(|_, field| !field.is_null());
            fields.values_mut().for_each(drop_nulls);
        }
        serde_json::Value::Array(items) => items.iter_mut().for_each(drop_nulls),
        _ => {}
    }
}

#[derive(Clone, Copy)]
enum Kind {
    Class,
    Claim,
    Template,
    Pod,
}

impl Kind {
    fn round_trip(self, raw: &serde_json::Value) -> anyhow::Result<serde_json::Value> {
        use drayman::api::resource::{ResourceClaim, ResourceClaimTemplate, ResourceClass};
        let raw = raw.clone();
        Ok(match self {
            Self::Class => serde_json::to_value(serde_json::from_value::<ResourceClass>(raw)?)?,
            Self::Claim => serde_json::to_value(serde_json::from_value::<ResourceClaim>(raw)?)?,
            Self::Template => serde_json::to_value(serde_json::from_value::<ResourceClaimTemplate>(raw)?)?,
            Self::Pod => serde_json::to_value(pod_from(raw)?)?,
        })
    }
}
