//! Tests of [`super`].

use super::*;

mod parameters {
    use super::*;
    use serde_json::json;

    fn class_spec(kind: &str) -> DeviceClassParametersSpec {
        DeviceClassParametersSpec {
            kind: kind.into(),
            ..DeviceClassParametersSpec::default()
        }
    }

    fn class() -> ClassParameters {
        ClassParameters::check("c", Ok(class_spec("test"))).unwrap()
    }

    fn device_requests(requests: &[(&str, u32)]) -> Result<DeviceRequests, ParametersError> {
        let requests = requests
            .iter()
            .map(|&(name, count)| DeviceRequest {
                name: name.into(),
                count: Some(count),
                ..DeviceRequest::default()
            })
            .collect();
        let spec = DeviceClaimParametersSpec {
            requests,
            constraints: Vec::new(),
        };
        let claim = ClaimParameters::check("ns", "p", Ok(spec))?;
        Ok(DeviceRequests::new(&class(), claim))
    }

    #[test]
    fn a_claim_without_parameters_wants_one_device() {
        let device_requests = DeviceRequests::new(&class(), ClaimParameters::default());
        assert_eq!(device_requests.total(), 1);
        assert_eq!(device_requests.kind(), "test");
    }

    #[test]
    fn requests_keep_their_order_and_add_up() {
        let device_requests = device_requests(&[("b", 2), ("a", 62)]).unwrap();
        assert_eq!(device_requests.total(), 64);
        assert_eq!(
            device_requests
                .requests()
                .iter()
                .map(CheckedRequest::name)
                .collect::<Vec<_>>(),
            ["b", "a"]
        );
    }

    #[test]
    fn invalid_parameters_name_the_object_the_field_and_the_limit() {
        let text = |requests: &[(&str, u32)]| device_requests(requests).unwrap_err().to_string();
        let limits = "1 to 64 are allowed";
        assert_eq!(
            text(&[("a", 0)]),
            format!("DeviceClaimParameters ns/p: request a has count 0; {limits}")
        );
        assert_eq!(
            text(&[("a", 1_000_000_000)]),
            format!("DeviceClaimParameters ns/p: request a has count 1000000000; {limits}")
        );
        assert_eq!(
            text(&[("a", 64), ("b", 1)]),
            "DeviceClaimParameters ns/p: the requests add up to 65 devices; a claim gets at most 64"
        );
        assert_eq!(
            text(&[("a", 1), ("a", 1)]),
            "DeviceClaimParameters ns/p: request a occurs twice; request names must be unique"
        );
        assert_eq!(
            text(&[]),
            "DeviceClaimParameters ns/p: spec.requests has 0 entries; 1 to 16 are allowed"
        );
        for name in ["", "A", "a/b", "-a", "../x", &"x".repeat(64), "a\0", "ä"] {
            assert_eq!(
                device_requests(&[(name, 1)]).unwrap_err().reason(),
                "ParametersInvalid",
                "{name:?}"
            );
            assert!(
                ClassParameters::check("c", Ok(class_spec(name))).is_err(),
                "{name:?}"
            );
        }
    }

    fn claim(spec: serde_json::Value) -> Result<DeviceRequests, String> {
        let spec = serde_json::from_value(spec).map_err(|error| error.to_string());
        let claim = ClaimParameters::check("ns", "p", spec).map_err(|error| error.to_string())?;
        Ok(DeviceRequests::new(&class(), claim))
    }

    fn refusal(spec: serde_json::Value) -> String {
        claim(spec)
            .unwrap_err()
            .replace("DeviceClaimParameters ns/p: ", "")
    }

    #[test]
    fn objects_of_the_first_release_keep_their_meaning() {
        let device_requests = claim(json!({"requests": [{"name": "a"}, {"name": "b", "count": 2}]})).unwrap();
        assert_eq!(device_requests.total(), 3);
        assert!(device_requests.constraints().is_empty() && !device_requests.spreads());
    }

    #[test]
    fn a_request_for_all_has_no_count() {
        let device_requests = claim(json!({"requests": [{"name": "a", "allocationMode": "All"}]})).unwrap();
        assert_eq!(device_requests.requests()[0].amount(), Amount::All);
        let both = json!({"requests": [{"name": "a", "allocationMode": "All", "count": 1}]});
        assert_eq!(
            refusal(both),
            "request a has allocationMode All and a count; remove one of them"
        );
        assert!(
            refusal(json!({"requests": [{"name": "a", "allocationMode": "Some"}]}))
                .contains("unknown variant")
        );
        assert!(
            refusal(json!({"requests": [{"name": "a", "count": 9_223_372_036_854_775_808_u64}]}))
                .contains("u32")
        );
    }

    #[test]
    fn a_request_has_the_selectors_of_its_class_and_its_own() {
        let mut spec = class_spec("test");
        spec.selectors = vec![DeviceSelector::cel("true")];
        let class = ClassParameters::check("c", Ok(spec)).unwrap();
        let requests = json!({"requests": [{"name": "a", "selectors": [{"cel": {"expression": "false"}}]}]});
        let spec = serde_json::from_value(requests).unwrap();
        let claim = ClaimParameters::check("ns", "p", Ok(spec)).unwrap();
        let device_requests = DeviceRequests::new(&class, claim);
        let labels: Vec<&str> = device_requests.requests()[0]
            .selectors()
            .iter()
            .map(|s| &**s.label())
            .collect();
        assert_eq!(labels, ["selector 1 of the class", "selector 1 of request a"]);
        assert_eq!(
            device_requests.requests()[0].selectors()[0]
                .refusal("x")
                .to_string(),
            "DeviceClassParameters c: selector 1 of the class: x"
        );
        assert_eq!(
            device_requests.requests()[0].selectors()[1]
                .refusal("x")
                .to_string(),
            "DeviceClaimParameters ns/p: selector 1 of request a: x"
        );
        let without_parameters = DeviceRequests::new(&class, ClaimParameters::default());
        assert_eq!(without_parameters.requests()[0].selectors().len(), 1);
    }

    #[test]
    fn too_many_and_too_long_selectors_are_refused() {
        let selectors = |expression: String, number| {
            let selector = json!({"cel": {"expression": expression}});
            json!({"requests": [{"name": "a", "selectors": vec![selector; number]}]})
        };
        assert!(claim(selectors("x".repeat(EXPRESSION_MAX), SELECTORS_MAX)).is_ok());
        assert_eq!(
            refusal(selectors("x".into(), 17)),
            "request a has 17 selectors; at most 16 are allowed"
        );
        for length in [0, 10_241] {
            let expected = format!("selector 1 of request a has {length} bytes; 1 to 10240 are allowed");
            assert_eq!(refusal(selectors("x".repeat(length), 1)), expected);
        }
        let mut spec = class_spec("test");
        spec.selectors = vec![DeviceSelector::cel("")];
        let error = ClassParameters::check("c", Ok(spec)).unwrap_err().to_string();
        assert!(error.starts_with("DeviceClassParameters c: selector 1 of the class has 0 bytes"));
    }

    #[test]
    fn a_constraint_needs_known_requests_and_a_qualified_attribute() {
        let spec = |requests: &[&str], attribute: &str, number| {
            let constraint = json!({"requests": requests, "matchAttribute": attribute});
            json!({"requests": [{"name": "a"}, {"name": "b"}], "constraints": vec![constraint; number]})
        };
        let requests = |named: &[&str]| {
            let device_requests = claim(spec(named, "d/x", 1)).unwrap();
            device_requests.constraints()[0].requests().to_vec()
        };
        assert_eq!(requests(&[]), [0, 1]);
        assert_eq!(requests(&["b", "b"]), [1]);
        assert_eq!(
            refusal(spec(&["c"], "d/x", 1)),
            "constraint 1 names request \"c\", which is not in spec.requests"
        );
        for attribute in ["", "x", "/x", "d/", "a/b/c", &format!("d/{}", "x".repeat(95))] {
            assert!(
                refusal(spec(&[], attribute, 1)).contains("it must be a domain, a slash and a name"),
                "{attribute}"
            );
        }
        assert_eq!(
            refusal(spec(&[], "d/x", 9)),
            "spec.constraints has 9 entries; at most 8 are allowed"
        );
    }
}

mod reference {
    use super::*;
    use crate::api::resource::{ResourceClaimParametersReference, ResourceClassParametersReference};

    #[test]
    fn a_class_must_refer_to_parameters_of_ours() {
        let mut class = ResourceClass::default();
        class.metadata.name = Some("fpga".into());
        let text = |class: &ResourceClass| class_reference(class).unwrap_err().to_string();
        assert!(
            text(&class)
                .starts_with("ResourceClass fpga has no parametersRef: set it to {apiGroup: drayman.dev,")
        );
        let reference = ResourceClassParametersReference {
            api_group: Some(GROUP.into()),
            kind: CLASS_PARAMETERS_KIND.into(),
            name: "p".into(),
            namespace: None,
        };
        class.parameters_ref = Some(reference.clone());
        assert_eq!(class_reference(&class), Ok("p"));
        class.parameters_ref = Some(ResourceClassParametersReference {
            namespace: Some("x".into()),
            ..reference.clone()
        });
        assert!(text(&class).contains("with a namespace"));
        class.parameters_ref = Some(ResourceClassParametersReference {
            api_group: None,
            ..reference
        });
        assert!(
            text(&class).contains("DeviceClassParameters of the core group, which this driver does not read")
        );
    }

    #[test]
    fn a_claim_may_refer_only_to_our_parameters() {
        let mut claim = ResourceClaim::default();
        assert_eq!(claim_reference(&claim), Ok(None));
        for (group, kind, fine) in [
            (Some(GROUP), CLAIM_PARAMETERS_KIND, true),
            (Some(GROUP), CLASS_PARAMETERS_KIND, false),
            (Some("other.example"), CLAIM_PARAMETERS_KIND, false),
            (None, "ConfigMap", false),
            (Some(""), "Secret", false),
        ] {
            let api_group = group.map(str::to_owned);
            let reference = ResourceClaimParametersReference {
                api_group,
                kind: kind.into(),
                name: "p".into(),
            };
            claim.spec.parameters_ref = Some(reference);
            assert_eq!(claim_reference(&claim).is_ok(), fine, "{group:?} {kind}");
        }
    }
}
