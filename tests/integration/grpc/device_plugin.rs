use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use drayman::api::proto::device_plugin_v1beta1::device_plugin_client::DevicePluginClient;
use drayman::api::proto::device_plugin_v1beta1::registration_server::{Registration, RegistrationServer};
use drayman::api::proto::device_plugin_v1beta1::{
    AllocateRequest, ContainerAllocateRequest, ContainerPreferredAllocationRequest, DevicePluginOptions,
    Empty, ListAndWatchResponse, PreStartContainerRequest, PreferredAllocationRequest, RegisterRequest,
};
use drayman::api::proto::plugin_registration::PluginInfo;
use drayman::node::kubelet::device_plugin::PluginRegistration;
use drayman::node::kubelet::{KubeletApiError, KubeletApiState, device_plugin};
use prost::Message as _;
use tokio::net::UnixListener;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tokio_stream::wrappers::UnixListenerStream;
use tokio_util::sync::CancellationToken;
use tonic::{Code, Request, Response, Status, Streaming};

use crate::grpc::fixture::{
    DRIVER, FakeCompanion, REFUSED, RESOURCE, RawClient, channel, device, paths, soon, until_state,
};

type Devices = Streaming<ListAndWatchResponse>;

/// The device manager of kubelet: within Register it connects to the plugin and reads its options, then it watches the devices.
#[derive(Clone)]
struct Kubelet {
    directory: PathBuf,
    refuse: Arc<AtomicBool>,
    /// Whether the answer is lost, after kubelet has connected.
    lose_answer: Arc<AtomicBool>,
    registered: mpsc::UnboundedSender<Devices>,
    requests: Arc<Mutex<Vec<RegisterRequest>>>,
}

#[tonic::async_trait]
impl Registration for Kubelet {
    async fn register(&self, request: Request<RegisterRequest>) -> Result<Response<Empty>, Status> {
        let request = request.into_inner();
        if self.refuse.load(Ordering::SeqCst) {
            return Err(Status::unknown("the version is not supported"));
        }
        let mut plugin = DevicePluginClient::new(channel(&self.directory.join(&request.endpoint)).await);
        let options = plugin.get_device_plugin_options(Empty {}).await?.into_inner();
        assert_eq!(Some(options), request.options);
        self.requests.lock().unwrap().push(request);
        let devices = plugin.list_and_watch(Empty {}).await?.into_inner();
        let _ = self.registered.send(devices);
        if self.lose_answer.load(Ordering::SeqCst) {
            return Err(Status::unavailable("lost"));
        }
        Ok(Response::new(Empty {}))
    }
}

struct RunningKubelet {
    kubelet: Kubelet,
    registrations: mpsc::UnboundedReceiver<Devices>,
    server: JoinHandle<()>,
}

impl RunningKubelet {
    /// Starts like kubelet: removes every socket in the directory and creates its own.
    fn start(directory: &Path) -> Self {
        fs::create_dir_all(directory).unwrap();
        for entry in fs::read_dir(directory).unwrap() {
            fs::remove_file(entry.unwrap().path()).unwrap();
        }
        let listener = UnixListener::bind(directory.join("kubelet.sock")).unwrap();
        let (registered, registrations) = mpsc::unbounded_channel();
        let kubelet = Kubelet {
            directory: directory.into(),
            refuse: Arc::default(),
            lose_answer: Arc::default(),
            registered,
            requests: Arc::default(),
        };
        let service = RegistrationServer::new(kubelet.clone());
        let server = tonic::transport::Server::builder()
            .add_service(service)
            .serve_with_incoming(UnixListenerStream::new(listener));
        let server = tokio::spawn(async move { server.await.unwrap() });
        Self {
            kubelet,
            registrations,
            server,
        }
    }

    async fn registration(&mut self) -> Devices {
        soon(self.registrations.recv()).await.expect("a registration")
    }
}

struct PluginEndpoint {
    directory: tempfile::TempDir,
    companion: Arc<FakeCompanion>,
    state: watch::Receiver<KubeletApiState>,
    shutdown: CancellationToken,
    task: JoinHandle<Result<(), KubeletApiError>>,
}

impl PluginEndpoint {
    fn open() -> Self {
        Self::open_by(PluginRegistration::KubeletSocket)
    }

    fn open_by(registration: PluginRegistration) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let (companion, shutdown) = (FakeCompanion::new(), CancellationToken::new());
        let (sender, state) = watch::channel(KubeletApiState::Starting);
        let serve = device_plugin::serve(
            companion.service.clone(),
            paths(&directory),
            registration,
            DRIVER.into(),
            RESOURCE.into(),
            sender,
            shutdown.clone(),
        );
        Self {
            directory,
            companion,
            state,
            shutdown,
            task: tokio::spawn(serve),
        }
    }

    fn kubelet_directory(&self) -> PathBuf {
        paths(&self.directory).device_plugin_dir
    }

    fn socket(&self) -> PathBuf {
        paths(&self.directory).device_plugin_socket(RESOURCE).path
    }

    async fn client(&self) -> DevicePluginClient<tonic::transport::Channel> {
        DevicePluginClient::new(channel(&self.socket()).await)
    }

    async fn close(self) {
        let socket = self.socket();
        self.shutdown.cancel();
        soon(self.task).await.unwrap().unwrap();
        assert!(!socket.exists());
    }
}

/// The next device list as IDs; unhealthy ones have a question mark.
async fn list(devices: &mut Devices) -> String {
    let message = soon(devices.message())
        .await
        .unwrap()
        .expect("the stream is open");
    let names = message.devices.iter().map(|device| match device.health.as_str() {
        "Healthy" => device.id.clone(),
        "Unhealthy" => format!("{}?", device.id),
        other => panic!("{other}"),
    });
    names.collect::<Vec<_>>().join(" ")
}

#[tokio::test]
async fn a_resource_is_registered_and_its_list_is_sent_on_change_only() {
    let mut plugin = PluginEndpoint::open();
    let mut kubelet = RunningKubelet::start(&plugin.kubelet_directory());
    let mut devices = kubelet.registration().await;
    until_state(&mut plugin.state, &KubeletApiState::Registered).await;
    let request = kubelet.kubelet.requests.lock().unwrap().remove(0);
    assert_eq!(
        (request.version.as_str(), request.resource_name.as_str()),
        ("v1beta1", RESOURCE)
    );
    let expected = DevicePluginOptions {
        pre_start_required: true,
        get_preferred_allocation_available: true,
    };
    assert_eq!(request.options, Some(expected));

    assert_eq!(list(&mut devices).await, "a");
    plugin
        .companion
        .devices
        .send_replace(vec![device("a", false), device("b", true)]);
    assert_eq!(list(&mut devices).await, "a? b");
    plugin
        .companion
        .devices
        .send_replace(vec![device("a", false), device("b", true)]);
    assert!(
        timeout(Duration::from_millis(300), devices.message())
            .await
            .is_err(),
        "no message without a change"
    );
    plugin.companion.devices.send_replace(vec![]);
    assert_eq!(list(&mut devices).await, "");

    // The end of the API closes the stream, and kubelet drops the resource.
    let ended = tokio::spawn(async move { devices.message().await });
    plugin.close().await;
    assert!(!matches!(soon(ended).await.unwrap(), Ok(Some(_))));
    kubelet.server.abort();
}

#[tokio::test]
async fn allocate_returns_edits_for_each_container() {
    let plugin = PluginEndpoint::open();
    let _kubelet = RunningKubelet::start(&plugin.kubelet_directory());
    crate::grpc::fixture::until_exists(&plugin.socket(), true).await;
    let mut client = plugin.client().await;
    let containers = |lists: &[&[&str]]| {
        let ids = |ids: &&[&str]| ContainerAllocateRequest {
            devices_ids: ids.iter().map(|id| (*id).to_owned()).collect(),
        };
        AllocateRequest {
            container_requests: lists.iter().map(ids).collect(),
        }
    };
    let answer = client
        .allocate(containers(&[&["a", "b"], &["c"]]))
        .await
        .unwrap()
        .into_inner();
    let answer = answer.container_responses;
    assert_eq!(answer.len(), 2);
    assert_eq!(answer[0].envs["DEVICES"], "a,b");
    assert_eq!(answer[0].devices[0].host_path, "/dev/a+b");
    assert_eq!(answer[1].devices[0].permissions, "rw");
    let mut code = async |lists: &[&[&str]]| client.allocate(containers(lists)).await.unwrap_err().code();
    assert_eq!(code(&[&["refuse"]]).await, Code::FailedPrecondition);
    assert_eq!(code(&[&["invalid"]]).await, Code::InvalidArgument);
    assert_eq!(code(&[&["forgotten"]]).await, Code::Internal);
    let hostile: [&[&[&str]]; 7] = [
        &[],
        &[&[]],
        &[&["a"], &[]],
        &[&["a", "a"]],
        &[&["a"], &["a"]],
        &[&[""]],
        &[&["a"] as &[&str]; 65],
    ];
    for hostile in hostile {
        assert_eq!(code(hostile).await, Code::InvalidArgument, "{hostile:?}");
    }
    let many = ContainerAllocateRequest {
        devices_ids: (0..4097).map(|index| index.to_string()).collect(),
    };
    let many = AllocateRequest {
        container_requests: vec![many],
    };
    assert_eq!(
        client.allocate(many).await.unwrap_err().code(),
        Code::InvalidArgument
    );
    plugin.close().await;
}

#[tokio::test]
async fn preferences_and_checks_before_a_start_are_answered() {
    let plugin = PluginEndpoint::open();
    let _kubelet = RunningKubelet::start(&plugin.kubelet_directory());
    crate::grpc::fixture::until_exists(&plugin.socket(), true).await;
    let mut client = plugin.client().await;
    let options = client
        .get_device_plugin_options(Empty {})
        .await
        .unwrap()
        .into_inner();
    assert!(options.pre_start_required && options.get_preferred_allocation_available);

    let ids = |ids: &[&str]| ids.iter().map(|id| (*id).to_owned()).collect::<Vec<String>>();
    let request = ContainerPreferredAllocationRequest {
        available_device_i_ds: ids(&["a", "b", "c"]),
        must_include_device_i_ds: ids(&["b"]),
        allocation_size: 2,
    };
    let requests = |container_requests| PreferredAllocationRequest { container_requests };
    let answer = client
        .get_preferred_allocation(requests(vec![request.clone(), request.clone()]))
        .await
        .unwrap()
        .into_inner();
    let choices: Vec<_> = answer
        .container_responses
        .into_iter()
        .map(|choice| choice.device_i_ds)
        .collect();
    assert_eq!(choices, [["b", "a"], ["b", "a"]]);
    let negative = ContainerPreferredAllocationRequest {
        allocation_size: -1,
        ..request.clone()
    };
    let oversized = ContainerPreferredAllocationRequest {
        available_device_i_ds: vec![String::new(); 5_000],
        ..request.clone()
    };
    for hostile in [vec![negative], vec![oversized], vec![request; 65]] {
        let refused = client.get_preferred_allocation(requests(hostile)).await;
        assert_eq!(refused.unwrap_err().code(), Code::InvalidArgument);
    }

    let mut start = async |list: &[&str]| {
        let devices_ids = ids(list);
        client
            .pre_start_container(PreStartContainerRequest { devices_ids })
            .await
    };
    start(&["a", "b"]).await.unwrap();
    let refused = start(&["refuse"]).await.unwrap_err();
    assert_eq!(
        (refused.code(), refused.message()),
        (Code::FailedPrecondition, REFUSED)
    );
    assert_eq!(
        plugin.companion.calls(),
        [
            "start test.drayman.dev/port a,b",
            "start test.drayman.dev/port refuse"
        ]
    );
    plugin.close().await;
}

/// The plugin watcher of kubelet: connects to a registration socket with its path as authority, reads the endpoint, and watches the devices
/// there.
#[tokio::test]
async fn a_plugin_watcher_finds_the_resource_again_after_its_stream() {
    let mut served = PluginEndpoint::open_by(PluginRegistration::PluginWatcher);
    let registration = paths(&served.directory)
        .device_plugin_registration_socket(DRIVER, RESOURCE)
        .path;
    let inode = || fs::metadata(&registration).unwrap().ino();
    for _ in 0..2 {
        crate::grpc::fixture::until_exists(&registration, true).await;
        let mut watcher = RawClient::connect(&registration).await;
        let authority = registration.display().to_string();
        let info = watcher
            .call(&authority, "/pluginregistration.Registration/GetInfo", b"")
            .await;
        let info = PluginInfo::decode(info.body.as_slice()).unwrap();
        assert_eq!(
            (info.r#type.as_str(), info.name.as_str(), info.supported_versions),
            ("DevicePlugin", RESOURCE, vec!["v1beta1".to_owned()])
        );
        let plugin = paths(&served.directory)
            .watched_device_plugin_socket(DRIVER, RESOURCE)
            .path;
        assert_eq!(Path::new(&info.endpoint), plugin);
        let mut client = DevicePluginClient::new(channel(&plugin).await);
        client.get_device_plugin_options(Empty {}).await.unwrap();
        let mut devices = client.list_and_watch(Empty {}).await.unwrap().into_inner();
        assert_eq!(list(&mut devices).await, "a");
        // The socket may have been renewed before the watcher connected.
        let found = inode();
        let notified = watcher
            .call(
                &authority,
                "/pluginregistration.Registration/NotifyRegistrationStatus",
                b"\x08\x01",
            )
            .await;
        assert_eq!(notified.status, "0");
        until_state(&mut served.state, &KubeletApiState::Registered).await;
        // The socket is not renewed during a watch; after the watch a new socket is created.
        assert_eq!(inode(), found);
        drop(devices);
        soon(async {
            while fs::metadata(&registration).map_or(true, |now| now.ino() == found) {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        })
        .await;
    }
    served.shutdown.cancel();
    soon(served.task).await.unwrap().unwrap();
    assert!(!registration.exists());
}

#[tokio::test]
async fn a_kubelet_that_restarts_gets_the_resource_again() {
    let mut plugin = PluginEndpoint::open();
    let directory = plugin.kubelet_directory();
    // At first there is no kubelet.
    until_state(&mut plugin.state, &KubeletApiState::Waiting).await;
    let mut kubelet = RunningKubelet::start(&directory);
    for _ in 0..3 {
        let mut devices = kubelet.registration().await;
        assert_eq!(list(&mut devices).await, "a");
        until_state(&mut plugin.state, &KubeletApiState::Registered).await;
        kubelet.server.abort();
        let _ = kubelet.server.await;
        drop(devices);
        kubelet = RunningKubelet::start(&directory);
    }
    let mut devices = kubelet.registration().await;
    assert_eq!(list(&mut devices).await, "a");
    // The whole directory is replaced.
    kubelet.server.abort();
    fs::rename(&directory, plugin.directory.path().join("away")).unwrap();
    kubelet = RunningKubelet::start(&directory);
    assert_eq!(list(&mut kubelet.registration().await).await, "a");
    plugin.close().await;
}

#[tokio::test]
async fn a_stream_that_kubelet_drops_leads_to_a_new_registration() {
    let plugin = PluginEndpoint::open();
    let mut kubelet = RunningKubelet::start(&plugin.kubelet_directory());
    drop(kubelet.registration().await);
    let devices = kubelet.registration().await;
    assert!(
        timeout(Duration::from_secs(4), kubelet.registrations.recv())
            .await
            .is_err(),
        "one registration only"
    );
    drop(devices);
    plugin.close().await;
}

/// Kubelet 1.37 refuses another registration while it is connected.
#[tokio::test]
async fn a_plugin_that_kubelet_watches_does_not_register_again() {
    let mut plugin = PluginEndpoint::open();
    let mut kubelet = RunningKubelet::start(&plugin.kubelet_directory());
    let first = kubelet.registration().await;
    kubelet.kubelet.lose_answer.store(true, Ordering::SeqCst);
    drop(first);
    let devices = kubelet.registration().await;
    until_state(&mut plugin.state, &KubeletApiState::Registered).await;
    fs::remove_file(plugin.socket()).unwrap();
    let another = timeout(Duration::from_secs(4), kubelet.registrations.recv());
    assert!(another.await.is_err());
    assert_eq!(*plugin.state.borrow(), KubeletApiState::Registered);
    drop(devices);
    plugin.close().await;
}

#[tokio::test]
async fn a_refusal_is_a_state_and_is_tried_again() {
    let mut plugin = PluginEndpoint::open();
    let directory = plugin.kubelet_directory();
    let mut kubelet = RunningKubelet::start(&directory);
    kubelet.kubelet.refuse.store(true, Ordering::SeqCst);
    // The plugin may have been registered before; a new socket triggers another registration.
    let _ = fs::remove_file(plugin.socket());
    until_state(
        &mut plugin.state,
        &KubeletApiState::Rejected {
            message: "the version is not supported".into(),
        },
    )
    .await;
    kubelet.kubelet.refuse.store(false, Ordering::SeqCst);
    until_state(&mut plugin.state, &KubeletApiState::Registered).await;
    assert_eq!(list(&mut kubelet.registration().await).await, "a");
    plugin.close().await;
}

#[tokio::test]
async fn a_resource_that_does_not_exist_or_has_no_name_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    for (name, reason) in [
        ("other.dev/x", "NoSuchResource"),
        ("kubernetes.io/x", "InvalidResourceName"),
    ] {
        let state = watch::Sender::new(KubeletApiState::Starting);
        let shutdown = CancellationToken::new();
        let error = device_plugin::serve(
            FakeCompanion::new().service.clone(),
            paths(&directory),
            PluginRegistration::KubeletSocket,
            DRIVER.into(),
            name.into(),
            state,
            shutdown,
        );
        assert_eq!(soon(error).await.unwrap_err().reason(), reason);
    }
}
