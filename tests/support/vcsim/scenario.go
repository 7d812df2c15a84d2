// The part of vcsim that is ours: a virtual machine with snapshots, and QueryChangedDiskAreas, which the
// simulator lacks. Compiled into a copy of its package (tools/vmware), for it reaches inside.

package simulator

import (
	"encoding/json"
	"os"

	"github.com/vmware/govmomi/vim25/methods"
	"github.com/vmware/govmomi/vim25/soap"
	"github.com/vmware/govmomi/vim25/types"
)

// vCenter answers with about this many areas at most.
const mostAreas = 2000

type disk struct {
	File     string
	ChangeID string
	Parents  []string
	// 0: that of the scenario.
	Capacity int64
}

type snapshot struct {
	ID, Name string
	Disk     disk
}

// Scenario is what a test wants to find; the file is read anew for each question.
type Scenario struct {
	UUID, InstanceUUID string
	PowerState         string
	Capacity           int64
	DiskObjectID       string
	Disk               disk
	Snapshots          []snapshot
	// By snapshot and change id: start and length of each changed area, in bytes.
	Changes map[string]map[string][][2]int64
	// After so many answers of a session it is gone; 0: never.
	Answers int
	// The bytes of the disk that one list of changed areas covers; 0: all.
	Covers int64
}

var (
	scenarioPath string
	answers      = map[string]int{}
)

func readScenario() (*Scenario, error) {
	text, err := os.ReadFile(scenarioPath)
	if err != nil {
		return nil, err
	}
	found := new(Scenario)
	return found, json.Unmarshal(text, found)
}

func (d disk) backing() *types.VirtualDiskFlatVer2BackingInfo {
	all := append([]string{d.File}, d.Parents...)
	var below *types.VirtualDiskFlatVer2BackingInfo
	for i := len(all) - 1; i >= 0; i-- {
		info := &types.VirtualDiskFlatVer2BackingInfo{DiskMode: "persistent", Parent: below}
		info.FileName = all[i]
		below = info
	}
	below.ChangeId = d.ChangeID
	return below
}

func (s *Scenario) devices(devices []types.BaseVirtualDevice, d disk) []types.BaseVirtualDevice {
	var kept []types.BaseVirtualDevice
	for _, device := range devices {
		if _, isDisk := device.(*types.VirtualDisk); !isDisk {
			kept = append(kept, device)
		}
	}
	capacity := s.Capacity
	if d.Capacity != 0 {
		capacity = d.Capacity
	}
	made := &types.VirtualDisk{
		CapacityInKB: capacity / 1024, CapacityInBytes: capacity, DiskObjectId: s.DiskObjectID,
	}
	made.Key = 2000
	made.Backing = d.backing()
	made.DeviceInfo = &types.Description{Label: "Hard disk 1", Summary: ""}
	return append(kept, made)
}

// Play makes the scenario's virtual machine of one of the model's.
func Play(path string) error {
	scenarioPath = path
	s, err := readScenario()
	if err != nil {
		return err
	}
	vm := Map.Any("VirtualMachine").(*VirtualMachine)
	vm.Config.Uuid, vm.Config.InstanceUuid = s.UUID, s.InstanceUUID
	vm.Runtime.PowerState = types.VirtualMachinePowerState(s.PowerState)
	hardware := vm.Config.Hardware.Device
	var tree *types.VirtualMachineSnapshotTree
	for i := len(s.Snapshots) - 1; i >= 0; i-- {
		each := s.Snapshots[i]
		object := new(VirtualMachineSnapshot)
		object.Self = types.ManagedObjectReference{Type: "VirtualMachineSnapshot", Value: each.ID}
		object.Vm = vm.Self
		object.Config = *vm.Config
		object.Config.Hardware.Device = s.devices(hardware, each.Disk)
		Map.Put(object)
		next := &types.VirtualMachineSnapshotTree{Snapshot: object.Self, Vm: vm.Self, Name: each.Name}
		next.State = vm.Runtime.PowerState
		if tree != nil {
			next.ChildSnapshotList = []types.VirtualMachineSnapshotTree{*tree}
		}
		tree = next
	}
	vm.Config.Hardware.Device = s.devices(hardware, s.Disk)
	if tree != nil {
		vm.Snapshot = &types.VirtualMachineSnapshotInfo{
			RootSnapshotList: []types.VirtualMachineSnapshotTree{*tree},
		}
	}
	return nil
}

// QueryChangedDiskAreas answers one page.
func (vm *VirtualMachine) QueryChangedDiskAreas(
	ctx *Context, req *types.QueryChangedDiskAreas,
) soap.HasFault {
	body := new(methods.QueryChangedDiskAreasBody)
	s, err := readScenario()
	if err != nil {
		panic(err)
	}
	if answers[ctx.Session.Key]++; s.Answers > 0 && answers[ctx.Session.Key] > s.Answers {
		ctx.svc.sm.delSession(ctx.Session.Key)
		// pyvmomi wants to know of which object.
		body.Fault_ = Fault("The session is not authenticated.", &types.NotAuthenticated{
			NoPermission: types.NoPermission{Object: vm.Self, PrivilegeId: "System.View"},
		})
		return body
	}
	name := ""
	if req.Snapshot != nil {
		name = req.Snapshot.Value
	}
	areas, known := s.Changes[name][req.ChangeId]
	if !known || req.DeviceKey != 2000 {
		body.Fault_ = Fault("Error caused by file", &types.FileFault{File: s.Disk.File})
		return body
	}
	if req.StartOffset >= s.Capacity {
		body.Fault_ = Fault("A specified parameter was not correct: startOffset",
			&types.InvalidArgument{InvalidProperty: "startOffset"})
		return body
	}
	info := types.DiskChangeInfo{StartOffset: req.StartOffset, Length: s.Capacity - req.StartOffset}
	if s.Covers > 0 && s.Covers < info.Length {
		info.Length = s.Covers
		areas = nil
	}
	for _, area := range areas {
		if area[0] >= 0 && area[1] >= 0 && area[0]+area[1] <= req.StartOffset && req.StartOffset > 0 {
			continue
		}
		if len(info.ChangedArea) == mostAreas {
			last := info.ChangedArea[mostAreas-1]
			info.Length = last.Start + last.Length - req.StartOffset
			break
		}
		info.ChangedArea = append(info.ChangedArea, types.DiskChangeExtent{Start: area[0], Length: area[1]})
	}
	body.Res = &types.QueryChangedDiskAreasResponse{Returnval: info}
	return body
}
