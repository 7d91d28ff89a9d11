{{- /* RELEASE-CHART, as RELEASE alone for each release that contains the chart's name would be one name for the releases x
       and x-simm. At most 40 characters: the name of a StatefulSet may have 52, and "-dataserver" follows. */ -}}
{{- define "simm.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- $full := eq $name .Release.Name | ternary $name (printf "%s-%s" .Release.Name $name) -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride -}}
{{- else if gt (len $full) 40 -}}
{{- printf "%s-%s" ($full | trunc 31 | trimSuffix "-") ($full | sha256sum | trunc 8) -}}
{{- else -}}
{{- $full -}}
{{- end -}}
{{- end -}}

{{- define "simm.selector" -}}
app.kubernetes.io/name: {{ default .root.Chart.Name .root.Values.nameOverride }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "simm.labels" -}}
{{ include "simm.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{- end -}}

{{- define "simm.image" -}}
{{- with .Values.image -}}
{{- if .digest }}{{ .repository }}@{{ .digest }}{{ else }}{{ .repository }}:{{ default $.Chart.AppVersion .tag }}{{ end -}}
{{- end -}}
{{- end -}}

{{- define "simm.tokenSecret" -}}
{{- default (printf "%s-token" (include "simm.fullname" .)) .Values.token.existingSecret -}}
{{- end -}}

{{- /* Each manager by its own name: clients and data servers try them in turn. */ -}}
{{- define "simm.managers" -}}
{{- $service := printf "%s-manager" (include "simm.fullname" .) -}}
{{- range $n := until (int .Values.manager.replicas) -}}
{{- if $n }},{{ end }}{{ $service }}-{{ $n }}.{{ $service }}.{{ $.Release.Namespace }}:{{ int64 $.Values.manager.port }}
{{- end -}}
{{- end -}}

{{- /* A UNIX socket's path has 107 bytes, and the end of it, /NAME.NUMBER.sock, up to 72. */ -}}
{{- define "simm.runtimeDir" -}}
{{- $folder := default (printf "/run/simm/%s.%s" .Release.Namespace (include "simm.fullname" .)) .Values.dataserver.runtimeDir -}}
{{- if gt (len $folder) 35 -}}
{{- if .Values.dataserver.runtimeDir -}}
{{- fail (printf "dataserver.runtimeDir: %s has more than 35 characters" $folder) -}}
{{- end -}}
/run/simm/{{ printf "%s.%s" .Release.Namespace (include "simm.fullname" .) | sha256sum | trunc 24 }}
{{- else -}}
{{- $folder -}}
{{- end -}}
{{- end -}}

{{- /* Mi of a quantity in Mi, Gi or Ti. */ -}}
{{- define "simm.mib" -}}
{{- $number := regexFind "^[0-9]+" . | int64 -}}
{{- if hasSuffix "Ti" . }}{{ mul $number 1048576 }}{{ else if hasSuffix "Gi" . }}{{ mul $number 1024 }}{{ else }}{{ $number }}{{ end -}}
{{- end -}}

{{- /* Bytes of a size as 4M. The schema admits ten digits: with more, an int64 that overflows could be within bounds. */ -}}
{{- define "simm.bytes" -}}
{{- mul (regexFind "^[0-9]+" . | int64) (get (dict "K" 1024 "M" 1048576 "G" 1073741824) (regexFind "[KMG]$" .) | default 1) -}}
{{- end -}}

{{- /* Mi of all arenas of a data server, whose values these are. auto is 80 % of the memory, at most. */ -}}
{{- define "simm.arenasMib" -}}
{{- if eq .arena "auto" -}}
{{- div (add 9 (mul 8 (include "simm.mib" .memory | int64))) 10 -}}
{{- else -}}
{{- mul (include "simm.mib" .arena | int64) (len (splitList "," (toString .numa))) .workers -}}
{{- end -}}
{{- end -}}

{{- /* With --reuse-values the values of a release before this one are all that there is. */ -}}
{{- define "simm.indexKey" -}}
{{- default "token" .Values.index.key -}}
{{- end -}}

{{- /* Refuses arenas that the data server would refuse: it and its processes need some of the memory themselves
       (simm/server/arena_stock.py has the figures). */ -}}
{{- define "simm.checkMemory" -}}
{{- with .Values.dataserver -}}
{{- $limit := include "simm.mib" .memory | int64 -}}
{{- if ne .arena "auto" -}}
{{- if eq (toString .numa) "all" -}}
{{- fail "dataserver.arena is the size of each worker's, and the chart cannot tell how many NUMA nodes there are: name them in dataserver.numa, or use arena: auto" -}}
{{- end -}}
{{- $workers := mul (len (splitList "," (toString .numa))) .workers -}}
{{- $children := mul $workers (add 2 .streams) -}}
{{- $room := sub $limit (add 48 (mul 16 $children)) -}}
{{- $arena := include "simm.mib" .arena | int64 -}}
{{- if gt (mul $arena (add (mul 512 $workers) $children)) (mul $room 512) -}}
{{- fail (printf "%d arena(s) of %s and their processes do not fit into dataserver.memory, %s; a server needs 48Mi, and for each worker's %d processes 16Mi and 1/512 of its arena" $workers .arena .memory (int (add 2 .streams))) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* Refuses a change of the manager's volume before helm has changed anything: Kubernetes takes none, and the data servers
       would restart for managers that do not come. Finds nothing where there is no cluster to ask, as in `helm template`. */ -}}
{{- define "simm.checkVolume" -}}
{{- $name := printf "%s-manager" (include "simm.fullname" .) -}}
{{- with (lookup "apps/v1" "StatefulSet" .Release.Namespace $name).spec -}}
{{- $there := "" -}}
{{- range .volumeClaimTemplates -}}
{{- $there = printf "%sMi %s" (include "simm.mib" .spec.resources.requests.storage) (default "" .spec.storageClassName) -}}
{{- end -}}
{{- $wanted := "" -}}
{{- if not $.Values.manager.coordinator.url -}}
{{- $wanted = printf "%sMi %s" (include "simm.mib" $.Values.manager.state.size) $.Values.manager.state.storageClass -}}
{{- end -}}
{{- if ne $there $wanted -}}
{{- fail (printf "manager.coordinator.url or manager.state: Kubernetes changes no volumes of a StatefulSet that is there, so first: kubectl -n %s delete --ignore-not-found statefulset/%s pvc/state-%s-0; the data path goes on meanwhile, and the next manager gets its state from the data servers; see docs/operations.md#the-managers-volume" $.Release.Namespace $name $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "simm.check" -}}
{{- include "simm.checkMemory" . -}}
{{- include "simm.checkVolume" . -}}
{{- with .Values -}}
{{- if and (gt (int .manager.replicas) 1) (not .manager.coordinator.url) -}}
{{- fail "several managers need manager.coordinator.url: without an etcd each would have a cluster of its own" -}}
{{- end -}}
{{- with .manager.coordinator -}}
{{- if and (or .caKey .certKey .loginKey) (not .existingSecret) -}}
{{- fail "manager.coordinator: its keys are those of existingSecret" -}}
{{- end -}}
{{- if and (hasPrefix "etcd://" .url) (or .caKey .certKey .loginKey) -}}
{{- fail "manager.coordinator: caKey, certKey and loginKey need a url that begins with etcds://, as nothing is encrypted by etcd://" -}}
{{- end -}}
{{- end -}}
{{- with .manager.settings -}}
{{- if le (default 5 .dead_after | int) (default 3 .suspect_after | int) -}}
{{- fail "manager.settings: dead_after (5 unless given) has to be more than suspect_after (3 unless given)" -}}
{{- end -}}
{{- end -}}
{{- with .dataserver.settings -}}
{{- if and .slots .value_size -}}
{{- fail "dataserver.settings: slots and value_size both say how large the table is; give one of them" -}}
{{- end -}}
{{- with .value_size -}}
{{- $bytes := include "simm.bytes" . | int64 -}}
{{- if or (lt $bytes 1) (gt $bytes 67088384) -}}
{{- fail (printf "dataserver.settings.value_size: %s is no size of a value; 1 to 65516K is" .) -}}
{{- end -}}
{{- end -}}
{{- with .events -}}
{{- $bytes := include "simm.bytes" . | int64 -}}
{{- if and (ne . "0") (or (lt $bytes 1048576) (gt $bytes 4294967296)) -}}
{{- fail (printf "dataserver.settings.events: %s is no size of a ring of events; 0 for none, or 1M to 4G is" .) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- /* "all" counts as one node here: the chart cannot tell how many there are. */ -}}
{{- $workers := mul (len (splitList "," (toString .dataserver.numa))) .dataserver.workers -}}
{{- if gt (int $workers) (.dataserver.rdma.enabled | ternary 32 64) -}}
{{- fail (printf "dataserver.numa and dataserver.workers make %d workers; a data server has 64 at most, and 32 with RDMA, as each then has two of the 64 ports" (int $workers)) -}}
{{- end -}}
{{- if eq (int .manager.port) (int .manager.httpPort) -}}
{{- fail "manager.port and manager.httpPort are one" -}}
{{- end -}}
{{- if and (ge (int .dataserver.httpPort) (int .dataserver.port)) (le (int .dataserver.httpPort) (add (int .dataserver.port) 63 | int)) -}}
{{- fail (printf "dataserver.httpPort is one of the 64 ports of workers and endpoints, from %d on" (int .dataserver.port)) -}}
{{- end -}}
{{- if and .dataserver.warm (ne .dataserver.sharedMemory "host") -}}
{{- fail "dataserver.warm needs sharedMemory: host, as a pod's /dev/shm ends with the pod" -}}
{{- end -}}
{{- if and .dataserver.engineGroup (ne .dataserver.sharedMemory "host") -}}
{{- fail "dataserver.engineGroup needs sharedMemory: host, as no engine sees a pod's /dev/shm" -}}
{{- end -}}
{{- /* With a group the data has no name: a stop copies it into /dev/shm, and the next start out of it. */ -}}
{{- if and .dataserver.warm .dataserver.engineGroup -}}
{{- $arenas := include "simm.arenasMib" .dataserver | int64 -}}
{{- $stop := add 30 (div (add 1023 $arenas) 1024) | int -}}
{{- if or (lt (int .dataserver.terminationGracePeriodSeconds) $stop) (lt (int .dataserver.startSeconds) $stop) (lt (int .dataserver.restartGraceSeconds) (mul 2 $stop | int)) -}}
{{- fail (printf "dataserver.warm with engineGroup: each stop and each start copies %dMi of arenas at a GiB a second, so set dataserver.terminationGracePeriodSeconds to %d or more, startSeconds to %d, and restartGraceSeconds to %d; else each rollout loses all values" $arenas $stop $stop (mul 2 $stop | int)) -}}
{{- end -}}
{{- end -}}
{{- $nodes := default list .networkPolicy.nodeCidrs -}}
{{- range .networkPolicy.from -}}
{{- if .ipBlock }}{{ $nodes = append $nodes .ipBlock }}{{ end -}}
{{- end -}}
{{- if and .networkPolicy.enabled .dataserver.rdma.enabled .dataserver.rdma.hostNetwork (not $nodes) -}}
{{- fail "dataserver.rdma.hostNetwork needs networkPolicy.nodeCidrs, the networks of the nodes (kubectl get nodes -o wide), as [10.0.0.0/16], or an ipBlock in networkPolicy.from: data servers then come from their node's address, and the manager's policy would keep them out" -}}
{{- end -}}
{{- if and .index.enabled (not .index.existingSecret) -}}
{{- fail "index.enabled needs index.existingSecret, a Secret for the index alone: with the Secret of token any tenant could ask about the prompts of all" -}}
{{- end -}}
{{- $key := include "simm.indexKey" $ -}}
{{- if and .index.enabled (has .index.existingSecret (list (include "simm.tokenSecret" $) .token.managerSecret)) (eq $key .token.key) -}}
{{- fail (printf "index.existingSecret and index.key are the servers' tokens, the key %s of the Secret %s: any tenant could ask about the prompts of all; make a Secret for the index alone" $key .index.existingSecret) -}}
{{- end -}}
{{- if .events.enabled }}
{{- if has (toString .dataserver.settings.events) (list "" "0" "<nil>") -}}
{{- fail "events.enabled needs dataserver.settings.events, the size of the rings that it reads, as 4M" -}}
{{- end -}}
{{- range $port := list (int .events.port) (add .events.port 1 | int) (int .events.httpPort) -}}
{{- if or (eq $port (int $.Values.dataserver.httpPort)) (and (ge $port (int $.Values.dataserver.port)) (le $port (add $.Values.dataserver.port 63 | int))) -}}
{{- fail (printf "events: the data server has the port %d" $port) -}}
{{- end -}}
{{- end -}}
{{- if has (int .events.httpPort) (list (int .events.port) (add .events.port 1 | int)) -}}
{{- fail "events.httpPort is one of the two ports from events.port on" -}}
{{- end -}}
{{- end -}}
{{- if and .prometheusRule.enabled (not .serviceMonitor.enabled) -}}
{{- fail "prometheusRule needs serviceMonitor: the alerts tell releases apart by the labels that it adds" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "simm.podSecurity" -}}
runAsNonRoot: true
runAsUser: {{ int64 .Values.user }}
runAsGroup: {{ int64 .Values.user }}
# The kubelet makes Secrets and volumes readable for this group.
fsGroup: {{ int64 .Values.user }}
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "simm.tlsServer" -}}
{{- with .Values.tls -}}
{{- if .existingSecret }}
- {name: SIMM_TLS_CERT, value: /etc/simm-tls/tls.crt}
- {name: SIMM_TLS_KEY, value: /etc/simm-tls/tls.key}
{{- with .clientCaKey }}
- {name: SIMM_TLS_CLIENT_CA, value: {{ printf "/etc/simm-tls/%s" . | quote }}}
{{- end }}
{{- end }}
{{- end -}}
{{- end -}}

{{- /* Text, whole numbers and booleans. Numbers are floats here, and large ones would be written 1e+06. */ -}}
{{- define "simm.settings" -}}
{{- range $name, $value := . }}
- {name: SIMM_{{ upper $name }}, value: {{ if kindIs "float64" $value }}{{ printf "%.0f" $value | quote }}{{ else }}{{ toString $value | quote }}{{ end }}}
{{- end }}
{{- end -}}

{{- define "simm.probe" -}}
{path: {{ .path }}, port: http{{ if .root.Values.tls.existingSecret }}, scheme: HTTPS{{ end }}}
{{- end -}}

{{- define "simm.placement" -}}
{{- with .nodeSelector }}
nodeSelector: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- end -}}

{{- /* Servers of one component on different nodes, unless the values say something else. */ -}}
{{- define "simm.affinity" -}}
{{- if .affinity }}
affinity: {{ toYaml .affinity | nindent 2 }}
{{- else if .apart }}
affinity:
  podAntiAffinity:
    requiredDuringSchedulingIgnoredDuringExecution:
      - topologyKey: kubernetes.io/hostname
        labelSelector:
          matchLabels: {{ include "simm.selector" . | nindent 12 }}
{{- end }}
{{- end -}}
