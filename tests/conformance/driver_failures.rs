//! Drivers that hang, panic or answer late.

use std::time::Duration;

use drayman::controller::LeaderElection;
use k8s_openapi::api::coordination::v1::Lease;
use kube::api::Api;

use crate::call::{Request, count};
use crate::fake_driver::Action;
use crate::fixture::{is_allocated, names, rules, with_fixture};
use crate::harness::rule;

#[test]
fn a_hanging_call_is_cancelled_and_delays_only_its_claim() -> anyhow::Result<()> {
    with_fixture("hangs", async |fixture| {
        let about = |request: &Request| request.is_about("stuck") || request.is_about("at-once");
        fixture.driver.on(
            move |request| request.is_allocate() && about(request),
            Action::Hang,
        );
        let limit = Duration::from_secs(2);
        let controller = fixture
            .start_as("", &fixture.driver, &rules(), |builder| {
                builder.call_timeout(limit)
            })
            .await?;
        fixture.waiting_pod("pod", &["stuck"], "node", &[]).await?;
        fixture.immediate("at-once").await?;
        fixture.wait_for_calls("allocate", 2..).await?;
        for number in 0..20 {
            fixture.immediate(&format!("other-{number}")).await?;
        }
        for number in 0..20 {
            fixture.wait_until_allocated(&format!("other-{number}")).await?;
        }
        let calls = fixture
            .driver
            .wait_for("deallocate", |calls| {
                count(calls, |request| request.is_deallocate() && about(request)) >= 2
            })
            .await?;
        for call in calls
            .iter()
            .filter(|call| call.request.is_allocate() && about(&call.request))
        {
            if let Some(ended) = call.ended {
                // The limit starts before the driver's own call, considerably so on a busy machine.
                assert!(ended - call.began >= limit / 2, "{:?}", ended - call.began);
            }
        }
        fixture
            .wait_for_event("pod", "DriverTimeout", "has not answered within 2s")
            .await?;
        fixture
            .wait_for_event("at-once", "DriverTimeout", "has not answered within 2s")
            .await?;
        fixture.driver.clear_rule();
        for name in ["stuck", "at-once"] {
            fixture.wait_until_allocated(name).await?;
        }
        controller.stop().await
    })
}

#[test]
fn every_kind_of_call_has_a_limit() -> anyhow::Result<()> {
    with_fixture("limits", async |fixture| {
        let limit = Duration::from_millis(500);
        let controller = fixture
            .start_as("", &fixture.driver, &rules(), |builder| {
                builder.call_timeout(limit)
            })
            .await?;
        fixture
            .driver
            .on(|request| matches!(request, Request::Class(_)), Action::Hang);
        fixture.waiting_pod("pod", &["one"], "", &names(["node"])).await?;
        fixture
            .wait_for_event("pod", "DriverTimeout", "has not answered")
            .await?;
        fixture
            .driver
            .on(|request| matches!(request, Request::Claim(_)), Action::Hang);
        fixture
            .driver
            .wait_for("read the claim twice", |calls| {
                count(calls, |request| matches!(request, Request::Claim(_))) >= 2
            })
            .await?;
        fixture.driver.on(Request::is_evaluate, Action::Hang);
        fixture.wait_for_calls("evaluate", 2..).await?;
        fixture.driver.clear_rule();
        fixture.wait_until_evaluated("pod").await?;
        fixture.immediate("two").await?;
        fixture.wait_until_allocated("two").await?;
        fixture.driver.on(Request::is_deallocate, Action::Hang);
        fixture.delete_claim("two").await?;
        fixture
            .wait_for_event("two", "DriverTimeout", "has not answered")
            .await?;
        fixture.wait_for_calls("deallocate", 2..).await?;
        assert!(is_allocated(&fixture.claims().get("two").await?));
        fixture.driver.clear_rule();
        fixture.wait_until_gone("two").await?;
        controller.stop().await
    })
}

#[test]
fn a_driver_that_panics_harms_only_its_own_claim() -> anyhow::Result<()> {
    with_fixture("panics", async |fixture| {
        fixture.driver.on(
            |request| request.is_allocate() && request.is_about("bad"),
            Action::Panic,
        );
        let controller = fixture.start().await?;
        fixture.immediate("bad").await?;
        fixture
            .wait_for_event("bad", "DriverPanicked", "panicked")
            .await?;
        fixture.wait_for_calls("deallocate", 1..).await?;
        fixture.immediate("good").await?;
        fixture.wait_until_allocated("good").await?;
        fixture.driver.clear_rule();
        fixture.wait_until_allocated("bad").await?;
        controller.stop().await
    })
}

#[test]
fn a_lease_is_released_only_when_every_call_has_ended() -> anyhow::Result<()> {
    with_fixture("hands-over", async |fixture| {
        let leases = Api::<Lease>::namespaced(fixture.cluster.client(), &fixture.name);
        let mut permissions = rules();
        permissions.push(rule(
            &["coordination.k8s.io"],
            &["leases"],
            &["get", "create", "update"],
        ));
        for (name, answers) in [("hangs", false), ("ends", true)] {
            fixture.driver.rule(move |request| match request {
                Request::Allocate { .. } if !answers => Action::Hang,
                _ => Action::Proceed,
            });
            let election = LeaderElection::new(&fixture.name, name, "test");
            let identity = election.identity.clone();
            let controller = fixture
                .start_as("", &fixture.driver, &permissions, |builder| {
                    builder.leader_election(Some(election))
                })
                .await?;
            let calls = count(&fixture.driver.calls(), Request::is_allocate);
            fixture.immediate(name).await?;
            fixture
                .driver
                .wait_for("allocate", |all| count(all, Request::is_allocate) > calls)
                .await?;
            if answers {
                fixture.wait_until_allocated(name).await?;
            }
            controller.stop().await?;
            let spec = leases.get(name).await?.spec.unwrap_or_default();
            let holder = if answers { String::new() } else { identity };
            assert_eq!(spec.holder_identity, Some(holder), "{name}");
        }
        Ok(())
    })
}
